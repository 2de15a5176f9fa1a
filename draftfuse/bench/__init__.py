"""The benchmark of draftfuse: the same draft loop in every mode that engines know, side by side in one process.

``cells`` names what is measured, ``modes`` how a loop can run, ``measure`` what a number means, ``command`` the
command line.
"""
