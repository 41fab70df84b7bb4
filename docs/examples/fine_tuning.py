"""Fine-tuning: a net that has learnt digits learns to tell odd from even.

Layers take parameters from a caffemodel by name. The last layer has another number of outputs now: under another name
it begins anew, and learns ten times as fast as the others. Another layer was renamed without need, and takes its
parameters by hand. A net that begins anew as a whole is trained beside this one.

Run learning_lenet.py first: this begins with its lenet.caffemodel.
"""

from pathlib import Path

import numpy as np

import blobmem as caffe
from blobmem import layers as L
from blobmem import params as P
from blobmem.data import mnist
from blobmem.proto import caffe_pb2

DIGITS = Path(__file__).parents[2] / "models" / "lenet" / "mnist"
ITERATIONS = 20
BATCH = 50


def net():
    fast = [{"lr_mult": 10, "decay_mult": 1}, {"lr_mult": 20, "decay_mult": 0}]
    xavier = {"type": "xavier"}
    n = caffe.NetSpec()
    n.data, n.label = L.MemoryData(batch_size=BATCH, channels=1, height=28, width=28, ntop=2)
    n.conv1 = L.Convolution(n.data, kernel_size=5, num_output=20, weight_filler=xavier)
    n.pool1 = L.Pooling(n.conv1, kernel_size=2, stride=2, pool=P.Pooling.MAX)
    n.conv2 = L.Convolution(n.pool1, kernel_size=5, num_output=50, weight_filler=xavier)
    n.pool2 = L.Pooling(n.conv2, kernel_size=2, stride=2, pool=P.Pooling.MAX)
    n.hidden = L.InnerProduct(n.pool2, num_output=500, weight_filler=xavier)
    n.relu1 = L.ReLU(n.hidden, in_place=True)
    n.parity = L.InnerProduct(n.relu1, num_output=2, weight_filler=xavier, param=fast)
    n.loss = L.SoftmaxWithLoss(n.parity, n.label)
    n.accuracy = L.Accuracy(n.parity, n.label)
    return n.to_proto()


def digits(name, count):
    images = mnist.read_idx(DIGITS / f"{name}-images-idx3-ubyte.gz", axes=3)[:count, None] / 256
    labels = mnist.read_idx(DIGITS / f"{name}-labels-idx1-ubyte.gz", axes=1)[:count] % 2
    return images.astype(np.float32), labels.astype(np.float32)


def solver():
    parameters = caffe_pb2.SolverParameter(
        train_net_param=net(), base_lr=0.001, momentum=0.9, lr_policy="fixed", random_seed=1, max_iter=ITERATIONS
    )
    result = caffe.get_solver(parameters)
    result.net.set_input_arrays(*digits("train", ITERATIONS * BATCH))
    return result


def accuracy(trained):
    judge = caffe.Net(net(), caffe.TEST)
    judge.share_with(trained)
    judge.set_input_arrays(*digits("t10k", 500))
    return np.mean([judge.forward()["accuracy"] for _ in range(500 // BATCH)])


tuned, scratch = solver(), solver()
tuned.net.copy_from("lenet.caffemodel")

# The file calls `hidden` ip1: parameters are arrays, and go from one net to the other by hand.
old = caffe.Net(str(DIGITS.parent / "deploy.prototxt"), "lenet.caffemodel", caffe.TEST)
for mine, theirs in zip(tuned.net.params["hidden"], old.params["ip1"], strict=True):
    mine.data[...] = theirs.data
assert np.array_equal(tuned.net.params["conv1"][0].data, old.params["conv1"][0].data)  # by name

losses = np.zeros((ITERATIONS, 2))
for it in range(ITERATIONS):
    for column, trainer in enumerate((tuned, scratch)):
        trainer.step(1)
        losses[it, column] = trainer.net.blobs["loss"].data
for column, name in enumerate(("fine-tuned", "anew")):
    print(f"{name}: loss {losses[0, column]:.3f} at first, {losses[-1, column]:.3f} at last")
tuned_accuracy, scratch_accuracy = accuracy(tuned.net), accuracy(scratch.net)
print(f"right after {ITERATIONS} iterations: fine-tuned {tuned_accuracy:.1%}, anew {scratch_accuracy:.1%}")
tuned.net.save("parity.caffemodel")
