"""transformers models: from names and tensors in memory to those of the checkpoint.

transformers 5 fuses experts and renames modules as it loads, and takes that back as it saves. Its
own taking back is used as an adapter, so that what is published is what `save_pretrained` writes.
transformers is looked up only where the model is one of its own.
"""

import sys

import torch

from reshard_trainer.names import WRAPPERS
from reshard_trainer.sources.recording import Adapter, StateDict


def conversion_of(model: torch.nn.Module) -> Adapter | None:
    """What `save_pretrained` does to names and tensors; None for a model of another kind."""
    models = sys.modules.get("transformers.modeling_utils")
    loading = sys.modules.get("transformers.core_model_loading")
    inner = unwrapped(model)
    if models is None or loading is None or not isinstance(inner, models.PreTrainedModel):
        return None
    ignored = frozenset(inner._keys_to_ignore_on_save or ())

    def adapter(state: StateDict) -> StateDict:
        kept = {name: tensor for name, tensor in state.items() if name not in ignored}
        saved: StateDict = loading.revert_weight_conversion(inner, kept)
        return saved

    return adapter


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside wrappers that hold nothing else, and inside PEFT's."""
    peft = sys.modules.get("peft.peft_model")
    while True:
        children = list(model._modules)
        if len(children) == 1 and children[0] in WRAPPERS:
            model = model.get_submodule(children[0])
        elif peft is not None and isinstance(model, peft.PeftModel):
            model = model.get_base_model()
        else:
            return model
