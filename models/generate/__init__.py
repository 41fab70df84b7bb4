"""Writes the train/test and deploy files of the larger nets in `models/`.

Run from the root of the repository:

    python -m models.generate              # rewrites models/*/{train_val,deploy}.prototxt
    python -m models.generate --into DIR   # the same files under another folder

Needs nothing but Python. The output depends on nothing but this code, so a test compares it with the files kept here.
LeNet and all solver files are written by hand and are not touched.
"""
