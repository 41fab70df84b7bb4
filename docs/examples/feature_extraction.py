"""Feature extraction: what an inner layer says about images in files, kept in HDF5 and LMDB.

Run learning_lenet.py first: this begins with its lenet.caffemodel. `blobmem extract-features` does the same for a net
that has a data layer.
"""

from pathlib import Path

import h5py
import lmdb
import numpy as np
from PIL import Image

import blobmem as caffe
from blobmem.data import mnist
from blobmem.data.writer import new_database

LENET = Path(__file__).parents[2] / "models" / "lenet"
COUNT, BATCH = 120, 40

# Images in files, as a camera would leave them: larger than the net's input, pixels from 0 to 255.
pictures = mnist.read_idx(LENET / "mnist" / "t10k-images-idx3-ubyte.gz", axes=3)[:COUNT]
labels = mnist.read_idx(LENET / "mnist" / "t10k-labels-idx1-ubyte.gz", axes=1)[:COUNT]
Path("pictures").mkdir(exist_ok=True)
files = [Path("pictures") / f"{number:04d}.png" for number in range(COUNT)]
for picture, file in zip(pictures, files, strict=True):
    Image.fromarray(picture).resize((56, 56), Image.Resampling.BILINEAR).save(file)

# The transformer makes inputs of images: resized, channels first, pixels in the range that the net was trained on.
net = caffe.Net(str(LENET / "deploy.prototxt"), "lenet.caffemodel", caffe.TEST)
net.blobs["data"].reshape(BATCH, 1, 28, 28)
transformer = caffe.io.Transformer({"data": net.blobs["data"].data.shape})
transformer.set_transpose("data", (2, 0, 1))
transformer.set_input_scale("data", 255 / 256)  # load_image gives 0 to 1

features = np.empty((COUNT, 500), np.float32)
for start in range(0, COUNT, BATCH):
    for index, file in enumerate(files[start : start + BATCH]):
        image = caffe.io.load_image(file, color=False)
        net.blobs["data"].data[index] = transformer.preprocess("data", image)
    net.forward(end="relu1")
    features[start : start + BATCH] = net.blobs["ip1"].data

# HDF5, in the form that HDF5Data layers read, and LMDB, in the form that Data layers do.
with h5py.File("features.h5", "w") as file:
    file["data"], file["label"] = features, labels.astype(np.float32)
with new_database("features_lmdb", overwrite=True) as database:
    for number, (row, label) in enumerate(zip(features, labels, strict=True)):
        datum = caffe.io.array_to_datum(row.reshape(-1, 1, 1), int(label))
        database.put(b"%08d" % number, datum.SerializeToString())

# They come back as they were.
with lmdb.open("features_lmdb", readonly=True, lock=False) as environment, environment.begin() as transaction:
    records = [caffe.proto.caffe_pb2.Datum.FromString(value) for _, value in transaction.cursor()]
assert np.array_equal([caffe.io.datum_to_array(record).ravel() for record in records], features)
assert [record.label for record in records] == labels.tolist()

# What features are good for: the nearest other image, in them, mostly shows the same digit.
distances = ((features[:, None] - features[None]) ** 2).sum(2)
np.fill_diagonal(distances, np.inf)
same = np.mean(labels[distances.argmin(1)] == labels)
print(f"{same:.0%} of the images have a nearest neighbour of the same digit")
