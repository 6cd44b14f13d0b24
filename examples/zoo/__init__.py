"""The zoo: the blocks that people train, a file a model, in the framework in which such models are written.

They know nothing of jln: `jln.fuse` finds what it takes. `models.py` has the list of all, each with the size of one
that is trained, and makes any of them a function of its parameters; `sharding.py` says where arrays lie on a mesh.
`train_*.py` train some of them, `benchmarks/steps.py` counts what their steps move, and `tests/fuse/test_zoo.py` holds
that fused they are the same function.
"""
