"""AlexNet and CaffeNet: the same layers, with normalisation and pooling in the other order."""

from __future__ import annotations

from .writer import MAX, Net, gaussian


def alexnet(deploy: bool) -> Net:
    """Krizhevsky et al. 2012 as in Caffe: two groups in conv2, conv4 and conv5, normalised before pooling."""
    net = Net("AlexNet", "alexnet", "AlexNet (Krizhevsky, Sutskever, Hinton 2012)", (3, 227, 227), deploy)
    return _layers(net, norm_first=True)


def caffenet(deploy: bool) -> Net:
    """Caffe's reference net: AlexNet pooled before it is normalised, which halves the memory of the norms."""
    net = Net("CaffeNet", "caffenet", "CaffeNet (AlexNet with pooling before normalisation)", (3, 227, 227), deploy)
    return _layers(net, norm_first=False)


def _layers(net: Net, norm_first: bool) -> Net:
    def pool_and_norm(blob: str, index: int) -> str:
        for step in ("norm", "pool") if norm_first else ("pool", "norm"):
            name = f"{step}{index}"
            blob = net.norm(name, blob) if step == "norm" else net.pool(name, blob, MAX, 3, stride=2)
        return blob

    # Biases above 0 give these rectifiers positive inputs at the start; the paper has 1, Caffe's AlexNet 0.1.
    positive = 0.1 if norm_first else 1
    wide = gaussian(0.005)
    narrow = gaussian(0.01)
    blob = net.data(train=256, test=50, deploy=10)
    blob = net.relu("relu1", net.conv("conv1", blob, 96, 11, stride=4, weight=narrow))
    blob = pool_and_norm(blob, 1)
    blob = net.relu("relu2", net.conv("conv2", blob, 256, 5, pad=2, group=2, weight=narrow, bias=positive))
    blob = pool_and_norm(blob, 2)
    blob = net.relu("relu3", net.conv("conv3", blob, 384, 3, pad=1, weight=narrow))
    blob = net.relu("relu4", net.conv("conv4", blob, 384, 3, pad=1, group=2, weight=narrow, bias=positive))
    blob = net.relu("relu5", net.conv("conv5", blob, 256, 3, pad=1, group=2, weight=narrow, bias=positive))
    blob = net.pool("pool5", blob, MAX, 3, stride=2)
    for index in (6, 7):
        blob = net.relu(f"relu{index}", net.fc(f"fc{index}", blob, 4096, weight=wide, bias=positive))
        blob = net.dropout(f"drop{index}", blob, 0.5)
    net.head(net.fc("fc8", blob, 1000, weight=narrow), top5=False)
    return net
