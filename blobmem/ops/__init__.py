"""The mathematics, per device family: functions over arrays and nothing else.

`blobmem.ops.registry` finds them by name. Importing this package imports no compiler; `registry.table("host")` does.
"""
