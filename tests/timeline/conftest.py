import pytest

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
