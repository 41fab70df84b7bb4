"""Net surgery: change a trained net's parameters by hand, save it, and load it again.

Run learning_lenet.py first: this begins with its lenet.caffemodel.
"""

from pathlib import Path

import numpy as np

import blobmem as caffe
from blobmem.data import mnist

LENET = Path(__file__).parents[2] / "models" / "lenet"
DEPLOY = str(LENET / "deploy.prototxt")

net = caffe.Net(DEPLOY, "lenet.caffemodel", caffe.TEST)
for name, blobs in net.params.items():
    print(name, *(blob.data.shape for blob in blobs))

# Sixty-four digits, and what the net makes of them.
images = mnist.read_idx(LENET / "mnist" / "t10k-images-idx3-ubyte.gz", axes=3)[:64, None] / 256
before = net.forward(data=images, blobs=["conv1"])
conv1, scores = before["conv1"].copy(), before["prob"].copy()

# A bias is an array like any other: everything that filter 0 sees is 1 more from now on.
net.params["conv1"][1].data[0] += 1
assert np.allclose(net.forward(data=images, blobs=["conv1"])["conv1"][:, 0], conv1[:, 0] + 1, atol=1e-5)
net.params["conv1"][1].data[0] -= 1

# Prune: the half of ip1's weights that is nearest to zero becomes zero.
weights = net.params["ip1"][0].data
weights[abs(weights) < np.median(abs(weights))] = 0
pruned = net.forward(data=images)["prob"].copy()
agree = np.mean(pruned.argmax(1) == scores.argmax(1))
print(f"without half of ip1's weights, {agree:.0%} of the digits are read as before")

# Save, and load into another net: by layer name, so its batch may be another.
net.save("pruned.caffemodel")
other = caffe.Net(DEPLOY, caffe.TEST)
other.copy_from("pruned.caffemodel")
other.blobs["data"].reshape(8, 1, 28, 28)
reloaded = other.forward(data=images[:8])["prob"]
assert np.allclose(reloaded, pruned[:8], atol=1e-6)
print(f"{np.mean(other.params['ip1'][0].data == 0):.0%} of the weights in pruned.caffemodel are zero")
