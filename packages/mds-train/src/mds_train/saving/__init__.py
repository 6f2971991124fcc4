"""When and where checkpoints of a run are written: in the background, in a second place, in need.

`mds_train.save` knows what one checkpoint holds; this folder knows what happens around it.
"""
