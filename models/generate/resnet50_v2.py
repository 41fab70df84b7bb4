"""ResNet-50 v2: activations before convolutions."""

from __future__ import annotations

from .resnet50 import STAGES
from .writer import AVE, MAX, MSRA, Net, gaussian


def resnet50_v2(deploy: bool) -> Net:
    """He et al. 2016, as in MXNet's resnet50_v2: images are normalised first, the 3x3 convolution has the stride."""
    title = "ResNet-50 v2 (He et al. 2016)"
    net = Net("ResNet-50-v2", "resnet50_v2", title, (3, 224, 224), deploy, bias_doubled=False)
    blob = net.data(train=32, test=25, deploy=1)
    blob = net.layer("bn_data", "BatchNorm", blob, "bn_data")
    blob = net.conv("conv1", blob, 64, 7, stride=2, pad=3, weight=MSRA, bias=None)
    blob = net.activation("conv1", "", blob)
    blob = net.pool("pool1", blob, MAX, 3, stride=2, pad=1, floor=True)
    for stage, depth, channels in STAGES:
        for index in range(depth):
            block = f"res{stage}{'abcdef'[index]}"
            stride = 2 if index == 0 and stage > 2 else 1
            blob = net.preactivated(block, blob, channels, (1, stride), project=index == 0)
    blob = net.pool("pool5", net.activation("last", "", blob), AVE)
    net.head(net.fc("fc1000", blob, 1000, weight=gaussian(0.01)))
    return net
