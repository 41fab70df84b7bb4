"""Fully convolutional: a net that reads one digit becomes one that reads a whole picture, a score for every place.

An InnerProduct over a window of C x H x W is a Convolution whose kernel is H x W: its weights are the same numbers in
the same order.

Run learning_lenet.py first: this begins with its lenet.caffemodel.
"""

from pathlib import Path

import numpy as np
from google.protobuf import text_format

import blobmem as caffe
from blobmem.data import mnist
from blobmem.proto import caffe_pb2

LENET = Path(__file__).parents[2] / "models" / "lenet"

# Another net file: ip1 and ip2 become convolutions, of new names so that nobody loads the old shapes into them.
classifier = caffe.Net(str(LENET / "deploy.prototxt"), "lenet.caffemodel", caffe.TEST)
param = text_format.Parse((LENET / "deploy.prototxt").read_text(), caffe_pb2.NetParameter())
kernels = {"ip1": classifier.blobs["pool2"].data.shape[2], "ip2": 1}
for layer in param.layer:
    if layer.name in kernels:
        outputs = layer.inner_product_param.num_output
        layer.ClearField("inner_product_param")
        layer.type = "Convolution"
        layer.convolution_param.num_output = outputs
        layer.convolution_param.kernel_size.append(kernels[layer.name])
        layer.name += "_conv"
Path("fully_convolutional.prototxt").write_text(text_format.MessageToString(param))

# Transplant: `flat` takes the weights over whatever the two shapes are.
dense = caffe.Net("fully_convolutional.prototxt", "lenet.caffemodel", caffe.TEST)
for name in kernels:
    dense.params[f"{name}_conv"][0].data.flat = classifier.params[name][0].data.flat
    dense.params[f"{name}_conv"][1].data[...] = classifier.params[name][1].data
dense.save("fully_convolutional.caffemodel")

# On one digit both say the same.
pictures = mnist.read_idx(LENET / "mnist" / "t10k-images-idx3-ubyte.gz", axes=3)
labels = mnist.read_idx(LENET / "mnist" / "t10k-labels-idx1-ubyte.gz", axes=1)
digit = np.float32(pictures[:1, None] / 256)
for net in (classifier, dense):
    net.blobs["data"].reshape(1, 1, 28, 28)
one, same = classifier.forward(data=digit)["prob"], dense.forward(data=digit)["prob"]
assert np.allclose(same[:, :, 0, 0], one, atol=1e-5)

# On a larger picture the dense one scores each window, 4 pixels apart: the product of the two poolings' strides.
canvas = np.zeros((1, 1, 56, 84), np.float32)
places = {(0, 0): 0, (0, 56): 1, (28, 28): 2}  # row and column -> which digit
for (row, column), number in places.items():
    canvas[0, 0, row : row + 28, column : column + 28] = pictures[number] / 256
dense.blobs["data"].reshape(*canvas.shape)
scores = dense.forward(data=canvas)["prob"]
print("scores:", scores.shape)
read = {place: int(scores[0, :, place[0] // 4, place[1] // 4].argmax()) for place in places}
for (row, column), number in places.items():
    print(f"at row {row}, column {column}: read {read[row, column]}, it is {labels[number]}")
