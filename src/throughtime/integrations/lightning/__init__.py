"""Lightning 2.6: training on streams, and modules written for 1.9's truncated backpropagation."""

from throughtime.errors import MissingExtraError

try:
    import lightning.pytorch as pl
except ModuleNotFoundError as error:
    raise MissingExtraError(
        "throughtime.integrations.lightning needs Lightning: pip install 'throughtime[lightning]'"
    ) from error
from throughtime.integrations.lightning.stream import StreamModule
from throughtime.integrations.lightning.tbptt import TBPTT
from throughtime.integrations.stretches import Loader


class LightningModule(TBPTT, pl.LightningModule):
    """Lightning's module with the truncated backpropagation of 1.9: all that an old module has to import."""


__all__ = ["TBPTT", "LightningModule", "Loader", "StreamModule"]
