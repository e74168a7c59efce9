"""The machines: one table each, theory of operation above it.

`offer` and `landing` are the two sides of a transfer, `peer` is a remote rank, `registration` an instance towards its
router.  `_table` compiles a declaration of `transitions` into what the core runs.
"""
