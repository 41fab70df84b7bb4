"""Where batches come from: the Data layer over LMDB and LevelDB databases, others over files, and what makes such.

source      what all such layers share; `prefetch` makes their batches ahead, in a line (`prefetch_line`)
database    records of a database in order, by position; `lmdb_file` and `lmdb_tree` read LMDB's, `leveldb` the others
datum       a record (Datum message) to an array; `images` decodes compressed ones
transform   crop, mirror, mean and scale
batches     whole batches by position, into given arrays; `plain` makes bytes of many records at once
feed        what layers of images share: to a CUDA device their batches travel as bytes, in units (`feed_unit`)
layer       the Data layer
writer      a new database, all of it or nothing
mnist       MNIST's files to databases
image_data  the ImageData layer: images that a list names (`image_list`), resized as OpenCV would (`resize`)
window_data the WindowData layer: regions of images (`window_file`), cut out of them (`window_cut`)
hdf5_data   the HDF5Data layer: rows of HDF5 files (`hdf5`)
hdf5_output the HDF5Output layer, which writes such files (`hdf5_write`)
order       the order of items under shuffle; `options` says what sources of images have in common
image_sets  images in files to databases, `tables` tables in text; `convert` is what conversions have in common
mean        the mean of a database; `features` what a net makes of its data
"""

from blobmem.data.hdf5_data import HDF5Data
from blobmem.data.hdf5_output import HDF5Output
from blobmem.data.image_data import ImageData
from blobmem.data.layer import Data
from blobmem.data.source import waiting_time
from blobmem.data.window_data import WindowData

__all__ = ["Data", "HDF5Data", "HDF5Output", "ImageData", "WindowData", "waiting_time"]
