"""Images and arrays for nets and from them, under pycaffe's names.

messages      arrays to BlobProto and Datum messages, and back
images        files to arrays, other sizes, ten crops
resampling    the interpolation itself
transformer   what a net wants done to an image before it sees it
"""

from blobmem.io.images import load_image, oversample, resize_image
from blobmem.io.messages import (
    array_to_blobproto,
    array_to_datum,
    arraylist_to_blobprotovecor_str,
    arraylist_to_blobprotovector_str,
    blobproto_to_array,
    blobprotovector_str_to_arraylist,
    datum_to_array,
)
from blobmem.io.transformer import Transformer
from blobmem.proto import caffe_pb2

__all__ = [
    "Transformer",
    "array_to_blobproto",
    "array_to_datum",
    "arraylist_to_blobprotovecor_str",
    "arraylist_to_blobprotovector_str",
    "blobproto_to_array",
    "blobprotovector_str_to_arraylist",
    "caffe_pb2",
    "datum_to_array",
    "load_image",
    "oversample",
    "resize_image",
]
