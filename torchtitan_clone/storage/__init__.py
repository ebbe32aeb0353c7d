"""Object stores: buckets of named objects that are put whole, read by ranges, listed and deleted, but never renamed.

- A *store* (`objects.py`) is a bucket and a prefix in it, as its URL says; the package obstore speaks to it.
- An *object* has a name below the prefix, a size and the time of the store's clock at which it was put.
- A *block* is a part of an object of fixed size, named by its digest; `blocks.py` keeps blocks on the local disk.
- A request that fails is repeated until a timeout; then it is a `StoreError`, which fits on one line.

The package is optional: `objects.py` imports it where a URL is configured.
"""
