"""ResNet-1001 for CIFAR-10."""

from __future__ import annotations

from .writer import AVE, MSRA, Net

DEPTH = 1001
STAGES = ((1, 16), (2, 32), (3, 64))  # number of the stage, its narrow channels
MEAN = (114, 123, 125)  # blue, green, red, of CIFAR-10's training images


def resnet1001(deploy: bool) -> Net:
    """He et al. 2016. As in the authors' code the first 1x1 convolution of a stage has the stride."""
    title = "ResNet-1001 for CIFAR-10 (He et al. 2016)"
    net = Net("ResNet-1001", "resnet1001", title, (3, 32, 32), deploy, bias_doubled=False)
    databases = ("cifar10_train_lmdb", "cifar10_test_lmdb")
    blob = net.data(train=64, test=50, deploy=1, databases=databases, mean=MEAN, scale=0.015625)
    blob = net.conv("conv1", blob, 16, 3, pad=1, weight=MSRA, bias=None)
    for stage, channels in STAGES:
        for index in range(1, (DEPTH - 2) // 9 + 1):
            stride = 2 if index == 1 and stage > 1 else 1
            blob = net.preactivated(f"res{stage}_{index}", blob, channels, (stride, 1), project=index == 1)
    blob = net.activation("last", "", blob)
    net.head(net.fc("fc10", net.pool("pool", blob, AVE), 10, weight=MSRA), top5=False)
    return net
