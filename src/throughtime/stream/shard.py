"""Shard: which rank of how many plays a stream here. Integers; the plan itself is `lanes.py`."""

from dataclasses import dataclass

from torch import distributed

from throughtime.errors import DataError


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `ranks`; `given` by the user, or found in the process group."""

    rank: int
    ranks: int
    given: bool

    @classmethod
    def of(cls, rank: int | None, ranks: int | None) -> "Shard":
        """As asked for; else this process's place in `torch.distributed`'s default group, if there is one.

        Raises:
            DataError: half of it is given, or a rank that is none of `ranks`.
        """
        if (rank is None) != (ranks is None):
            raise DataError(f"rank={rank}, ranks={ranks}: expected both or neither; without them torch.distributed's group says")
        if rank is not None and ranks is not None:
            if not 0 <= rank < ranks:
                raise DataError(f"rank={rank}, ranks={ranks}: expected a rank from 0 to ranks - 1")
            return cls(rank, ranks, given=True)
        return cls(*_group(), given=False)

    def check(self) -> None:
        """Refuses a stream that was made before the process group, and would play everything on every rank.

        Raises:
            DataError: the group has another size now.
        """
        rank, ranks = _group()
        if not self.given and (rank, ranks) != (self.rank, self.ranks):
            raise DataError(
                f"the stream was made for rank {self.rank} of {self.ranks}, and this process is rank {rank} of {ranks} now: every rank "
                "would play the wrong recordings. Make the stream after torch.distributed.init_process_group (after Accelerator(), inside "
                "the strategy), or say rank=..., ranks=..."
            )


def _group() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
