from functools import partial

import pytest

from blobmem import SimulatedDevice
from blobmem.timeline import timelines

NET = """
name: "chain"
layer { name: "in" type: "Input" top: "x" top: "y" input_param { shape { dim: 2 dim: 5 } shape { dim: 2 dim: 100 } } }
layer { name: "fc1" type: "InnerProduct" bottom: "x" top: "a" inner_product_param { num_output: 300 } }
layer { name: "relu" type: "ReLU" bottom: "a" top: "a" }
layer { name: "fc2" type: "InnerProduct" bottom: "a" top: "b" inner_product_param { num_output: 200 } }
layer { name: "fc3" type: "InnerProduct" bottom: "b" top: "c<1>" inner_product_param { num_output: 100 } }
layer { name: "loss" type: "EuclideanLoss" bottom: "c<1>" bottom: "y" top: "loss" include { phase: TRAIN } }
"""


@pytest.fixture(scope="session")
def chain():
    """Timelines by scheme of a small net, one of whose names has to be escaped."""
    return timelines(NET)


@pytest.fixture(scope="session")
def evicting():
    """The timeline of a train net whose device may hold two thirds of what it needs."""
    text = 'layer { name: "in" type: "Input" top: "0" input_param { shape { dim: 8 dim: 8 dim: 32 dim: 32 } } }'
    for at in range(6):
        text += f'''
            layer {{ name: "c{at}" type: "Convolution" bottom: "{at}" top: "{at + 1}"
                     convolution_param {{ num_output: 8 kernel_size: 3 pad: 1 }} }}
            layer {{ name: "t{at}" type: "TanH" bottom: "{at + 1}" top: "{at + 1}" }}'''
    text += 'layer { name: "sum" type: "Reduction" bottom: "6" top: "sum" loss_weight: 1 include { phase: TRAIN } }'
    need = timelines(text)["planned"][0].nbytes
    device = partial(SimulatedDevice, need * 2 // 3 + (1 << 18), compute=False)
    return timelines(text, make_device=device)["planned"][0]
