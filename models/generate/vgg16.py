"""VGG-16 (configuration D)."""

from __future__ import annotations

from .writer import MAX, MSRA, Net, gaussian

STAGES = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))  # convolutions, channels


def vgg16(deploy: bool) -> Net:
    """Simonyan and Zisserman 2014: thirteen 3x3 convolutions in five stages, three fully connected layers."""
    net = Net("VGG-16", "vgg16", "VGG-16 (Simonyan, Zisserman 2014)", (3, 224, 224), deploy)
    blob = net.data(train=64, test=50, deploy=10)
    for stage, (depth, channels) in enumerate(STAGES, start=1):
        for index in range(1, depth + 1):
            blob = net.conv(f"conv{stage}_{index}", blob, channels, 3, pad=1, weight=MSRA)
            net.relu(f"relu{stage}_{index}", blob)
        blob = net.pool(f"pool{stage}", blob, MAX, 2, stride=2)
    for index in (6, 7):
        blob = net.relu(f"relu{index}", net.fc(f"fc{index}", blob, 4096, weight=MSRA))
        blob = net.dropout(f"drop{index}", blob, 0.5)
    net.head(net.fc("fc8", blob, 1000, weight=gaussian(0.01)))
    return net
