"""Where batches come from: the Data layer over LMDB databases, and what makes such databases.

database    records of a database in order, by position
datum       a record (Datum message) to an array; `images` decodes compressed ones
transform   crop, mirror, mean and scale
batches     whole batches by position, into given arrays
layer       the Data layer
writer      a new database, all of it or nothing
mnist       MNIST's files to databases
"""

from blobmem.data.layer import Data

__all__ = ["Data"]
