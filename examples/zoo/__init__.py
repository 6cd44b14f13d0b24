"""The zoo: the blocks that people train, a file a model, in the framework in which such models are written.

They know nothing of jln: `jln.fuse` finds what it takes. What no norm touches is as simple as it can be: all rotate
positions by one base, none has a window or a bias of attention. `models.py` has the list of all, each with the size of
one that is trained, and makes any of them a function of its parameters; `sharding.py` says where arrays lie on a mesh.
`train_lm.py` trains one of them, `benchmarks/steps.py` counts what the steps of all move, and `tests/fuse/test_zoo.py`
holds that fused they are the same function.
"""
