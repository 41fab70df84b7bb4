"""LRN: what it keeps, and what its gradient reads."""

import numpy as np
import pytest

LRN = 'layer { name: "l" type: "LRN" bottom: "x" top: "%s" lrn_param { local_size: 3 alpha: 0.5 norm_region: %s } }'


@pytest.mark.parametrize("region", ["ACROSS_CHANNELS", "WITHIN_CHANNEL"])
def test_only_in_place_is_anything_kept(layer_net, region):
    assert not layer_net(LRN % ("y", region), x=(2, 3, 4, 5)).internals
    assert list(layer_net(LRN % ("x", region), x=(2, 3, 4, 5)).internals) == ["l/bottom"]


def test_across_channels_the_top_may_change_before_the_gradient(layer_net, device):
    gradients = []
    for change in (False, True):
        net = layer_net(LRN % ("y", "ACROSS_CHANNELS"), device=device, x=(2, 7, 4, 5))
        net.forward()
        if change:
            net.blobs["y"].data[...] = 9
        net.blobs["y"].diff[...] = np.arange(280).reshape(2, 7, 4, 5)
        net.run_backward()
        gradients.append(net.blobs["x"].cpu_diff().copy())
    assert gradients[0].any() and np.array_equal(*gradients)
