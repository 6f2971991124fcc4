"""Token datasets on Zarr at the speed of a raw memory map."""
