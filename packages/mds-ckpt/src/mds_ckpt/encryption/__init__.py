"""Encryption at rest of a folder of files, as docs/formats/encryption.md says.

These files are the same, byte for byte, in mds-data and mds-ckpt, which don't import each other:
change both. They know no store and no checkpoint, and nothing here opens a file of one.
"""
