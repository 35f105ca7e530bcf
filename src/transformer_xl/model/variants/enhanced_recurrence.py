r"""Memories of outputs (ERNIE-Doc; Ding et al., 2021, arXiv 2012.15688).

The memory of layer n holds its outputs instead of its inputs:

$$\tilde h^{n-1}_{\tau+1} = [\mathrm{SG}(h^n_\tau) \circ h^{n-1}_{\tau+1}]$$

Within the segment, layers still attend to inputs. So the context grows without limit instead of by
one memory per layer, but results depend on the segmentation: use segments about as long as in
training, or shorter.
"""

from jaxtyping import Float
from torch import Tensor

from transformer_xl.model.layer import DecoderLayer
from transformer_xl.model.segment import View


def keep_output(
    layer: DecoderLayer, x: Float[Tensor, "B T D"], y: Float[Tensor, "B T D"], view: View
) -> Float[Tensor, "B T D"]:
    """Return what the memory keeps of a segment: the output of the layer."""
    if view.join is not None:
        # In the place of the keys and values that the segment itself attended to.
        view.join(layer.number, *layer.keys_and_values(y))
    return y
