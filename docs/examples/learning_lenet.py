"""Learn LeNet step by step, looking inside as it learns.

Takes the digits that are in the repository, describes net and solver in Python, and trains one iteration at a time.
Leaves mnist_train_lmdb, mnist_test_lmdb, the two prototxt files and lenet.caffemodel in the working folder; the other
examples begin with the last of these.
"""

from pathlib import Path

import numpy as np

import blobmem as caffe
from blobmem import layers as L
from blobmem import params as P
from blobmem.data import mnist
from blobmem.proto import caffe_pb2

DIGITS = Path(__file__).parents[2] / "models" / "lenet" / "mnist"
ITERATIONS = 200
TEST_EVERY = 50
TEST_BATCHES = 5


def lenet(source, batch_size):
    xavier = {"type": "xavier"}
    n = caffe.NetSpec()
    n.data, n.label = L.Data(
        source=source, backend=P.Data.LMDB, batch_size=batch_size, transform_param={"scale": 1 / 256}, ntop=2
    )
    n.conv1 = L.Convolution(n.data, kernel_size=5, num_output=20, weight_filler=xavier)
    n.pool1 = L.Pooling(n.conv1, kernel_size=2, stride=2, pool=P.Pooling.MAX)
    n.conv2 = L.Convolution(n.pool1, kernel_size=5, num_output=50, weight_filler=xavier)
    n.pool2 = L.Pooling(n.conv2, kernel_size=2, stride=2, pool=P.Pooling.MAX)
    n.ip1 = L.InnerProduct(n.pool2, num_output=500, weight_filler=xavier)
    n.relu1 = L.ReLU(n.ip1, in_place=True)
    n.ip2 = L.InnerProduct(n.relu1, num_output=10, weight_filler=xavier)
    n.loss = L.SoftmaxWithLoss(n.ip2, n.label)
    return n.to_proto()


# The data, the two nets and the solver.
mnist.convert(DIGITS, ".", overwrite=True)
Path("lenet_train.prototxt").write_text(str(lenet("mnist_train_lmdb", 64)))
Path("lenet_test.prototxt").write_text(str(lenet("mnist_test_lmdb", 100)))
parameters = caffe_pb2.SolverParameter(
    train_net="lenet_train.prototxt",
    test_net=["lenet_test.prototxt"],
    test_iter=[TEST_BATCHES],
    test_interval=ITERATIONS + 1,  # this script tests by itself
    base_lr=0.03,
    momentum=0.9,
    weight_decay=5e-4,
    lr_policy="inv",
    gamma=1e-3,
    power=0.75,
    max_iter=ITERATIONS,
    random_seed=1701,
    test_initialization=False,
)
solver = caffe.get_solver(parameters)

# One batch through both nets; then one step, and what it did to the filters of conv1.
solver.net.forward()
solver.test_nets[0].forward()
print({name: blob.data.shape for name, blob in solver.net.blobs.items()})
solver.step(1)
print("largest gradient of conv1:", abs(solver.net.params["conv1"][0].diff).max())

# Learn, keep each loss, and see what the net makes of the same eight test images as it gets better.
train_loss = np.zeros(ITERATIONS)
scores = np.zeros((ITERATIONS, 8, 10))
test_accuracy = []
for it in range(ITERATIONS):
    solver.step(1)
    train_loss[it] = solver.net.blobs["loss"].data
    # from conv1 on, the test net keeps the batch that it has
    solver.test_nets[0].forward(start="conv1")
    scores[it] = solver.test_nets[0].blobs["ip2"].data[:8]
    if (it + 1) % TEST_EVERY == 0:
        # the weights as they are now: on another copy of the test net, so that the eight images stay
        judge = caffe.Net("lenet_test.prototxt", caffe.TEST)
        judge.share_with(solver.net)
        right = 0
        for _ in range(TEST_BATCHES):
            judge.forward()
            right += sum(judge.blobs["ip2"].data.argmax(1) == judge.blobs["label"].data)
        test_accuracy.append(right / (TEST_BATCHES * 100))
        print(f"iteration {it + 1}: loss {train_loss[it]:.3f}, {test_accuracy[-1]:.1%} of the test images right")

first_labels = solver.test_nets[0].blobs["label"].data[:8].astype(int)
solver.net.save("lenet.caffemodel")
