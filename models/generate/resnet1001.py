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
            blob = _block(net, f"res{stage}_{index}", blob, channels, stride, project=index == 1)
    blob = net.activation("last", "", blob)
    net.head(net.fc("fc10", net.pool("pool", blob, AVE), 10, weight=MSRA), top5=False)
    return net


def _block(net: Net, block: str, bottom: str, channels: int, stride: int, project: bool) -> str:
    """A bottleneck: 1x1, 3x3, 1x1 with four times the channels, each behind its activation, and added to the input.

    Where the block projects its input, the projection reads what the first activation gives; that one is in place then.
    """

    def conv(part: str, source: str, outputs: int, kernel: int, stride: int = 1) -> str:
        name = f"{block}_{part}"
        return net.conv(name, source, outputs, kernel, stride=stride, pad=kernel // 2, weight=MSRA, bias=None)

    blob = net.activation(block, "1", bottom, top=None if project else f"{block}_bn1")
    shortcut = conv("shortcut", blob, 4 * channels, 1, stride) if project else bottom
    blob = conv("conv1", blob, channels, 1, stride)
    blob = conv("conv2", net.activation(block, "2", blob), channels, 3)
    blob = conv("conv3", net.activation(block, "3", blob), 4 * channels, 1)
    return net.layer(block, "Eltwise", [shortcut, blob], block)
