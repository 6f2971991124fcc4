"""A small store to encrypt, and what its tests share."""

from __future__ import annotations

from store_material import random_documents

DOCUMENTS = random_documents(30, seed=5, longest=90)


def tree(root):
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }
