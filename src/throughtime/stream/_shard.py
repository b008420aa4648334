"""Which of how many ranks plays a stream in this process."""

from dataclasses import dataclass

from torch import distributed

from throughtime.errors import DataError


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `ranks`; `fixed` by the user, or taken from the process group."""

    rank: int
    ranks: int
    fixed: bool

    @classmethod
    def of(cls, rank: int | None, ranks: int | None) -> "Shard":
        """The user's rank, or that of `torch.distributed`'s default group, or 0 of 1.

        Raises:
            DataError: only one of the two is set, or a rank that is none of `ranks`.
        """
        if (rank is None) != (ranks is None):
            raise DataError(
                f"rank={rank}, ranks={ranks}: expected both or neither; without them"
                " torch.distributed's group says"
            )
        if rank is None or ranks is None:
            return cls(*_group(), fixed=False)
        if not 0 <= rank < ranks:
            raise DataError(f"rank={rank}, ranks={ranks}: expected a rank from 0 to ranks - 1")
        return cls(rank, ranks, fixed=True)

    def current(self) -> "Shard":
        """The shard in the process group of now; a fixed one stays."""
        return self if self.fixed else Shard(*_group(), fixed=False)


def _group() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
