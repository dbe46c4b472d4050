"""Logits processing and sampling. The kernels are in `logits_kernels.py` and `sampling_kernels.py`.

Nothing here waits for the device. Numbers of the host go there in one copy of pinned memory an op, as few as they are.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.backend import DeviceTokens, Penalties, SamplingOptions, TopLogprobs
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.kernel_args import power_of_two
from quire.kernels.gpu.logits_kernels import (
    add_values,
    ban_where,
    join_largest,
    join_sums,
    keep_bits,
    largest_parts,
    order_keys,
    penalize,
    sum_parts,
)
from quire.kernels.gpu.sampling_kernels import draw

READ = 4096  # logits that a program looks at together
PART = 16384  # logits of one sum; fixed, so that sums do not depend on the batch
ENTRIES = 256  # of a list, for each program
DRAW = {"num_warps": 16, "weigh": 2048, "read": 2048}  # see `draw`
PIECES = {"num_warps": 16, "weigh": 2048, "read": 2048, "rounds": 4}  # of rows that are cut
MAX_ORDERED = 1 << 24  # logits that are ordered at once, which bounds the keys' memory to 128 MB


class SamplingOps(ArrayOps):
    """Logits and sampling."""

    def apply_penalties(self, logits: torch.Tensor, penalties: Penalties, last: DeviceTokens | None = None) -> None:
        """All arguments are copied to the device together."""
        rows, starts, ids, counts, *factors = penalties
        count, places = len(ids), len(rows)
        if not count and last is None:
            return
        entries = np.empty(3 * count + 7 * places, np.int32)
        lists, options = entries[: 3 * count].reshape(3, count), entries[3 * count :].reshape(7, places)
        lists[0], lists[1], lists[2] = np.repeat(np.arange(places, dtype=np.int32), np.diff(starts)), ids, counts
        options[0] = rows
        for line, values in zip(options[1:4], factors, strict=True):
            line[:] = np.asarray(values, np.float32).view(np.int32)
        options[4] = -1 if last is None else last.indices
        options[5], options[6] = starts[:-1], starts[1:]
        # The same kernel with and without device tokens: its rounding must not depend on when a token is known.
        tokens = torch.empty(1, dtype=torch.int64, device=logits.device) if last is None else last.tokens
        grid = (-(-count // ENTRIES) + (0 if last is None else places),)
        penalize[grid](logits, logits.stride(0), self.from_numpy(entries), count, places, tokens, ENTRIES)

    def ban_after(
        self, logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray, last: DeviceTokens, before: np.ndarray
    ) -> None:
        count = len(rows)
        entries = np.stack([rows, tokens, last.indices, before]).astype(np.int32)
        grid = (-(-count // ENTRIES),)
        ban_where[grid](logits, logits.stride(0), self.from_numpy(entries), count, last.tokens, ENTRIES)

    def add_bias(self, logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray, values: np.ndarray) -> None:
        """What is added to the same logit is added up on the host, so that the order of additions is fixed."""
        pairs, where = np.unique(rows.astype(np.int64) * logits.shape[1] + tokens, return_inverse=True)
        sums = np.zeros(len(pairs), np.float32)
        np.add.at(sums, where, values)
        count = len(pairs)
        if count:
            entries = np.empty((3, count), np.int32)
            entries[0], entries[1] = np.divmod(pairs, logits.shape[1])
            entries[2] = sums.view(np.int32)
            grid = (-(-count // ENTRIES),)
            add_values[grid](logits, logits.stride(0), self.from_numpy(entries), count, ENTRIES)

    def put_rows(self, logits: torch.Tensor, rows: np.ndarray, values: np.ndarray) -> None:
        logits.index_copy_(0, self.from_numpy(rows.astype(np.int64)), self.from_numpy(values))

    def apply_bitmask(self, logits: torch.Tensor, rows: np.ndarray, bitmask: np.ndarray) -> None:
        size = logits.shape[1]
        grid = (len(rows), -(-size // READ))
        places, bits = self.from_numpy(rows.astype(np.int64)), self.from_numpy(bitmask)
        keep_bits[grid](logits, logits.stride(0), size, places, bits, bitmask.shape[1], READ)

    def rows_finite(self, logits: torch.Tensor) -> torch.Tensor:
        return self._largest(logits)[1]

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        return self._largest(logits)[0]

    def _largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first largest logit's token int64 [R], and whether the row is finite; two launches.

        A row is cut so that there are two programs for each multiprocessor; a maximum is the same however it is cut.
        """
        rows, size = logits.shape
        pieces = max(1, min(-(-size // READ), 2 * self.num_sms // max(1, rows)))
        part = -(-size // (pieces * READ)) * READ
        pieces = -(-size // part)
        tops = torch.empty((rows, pieces), dtype=torch.float32, device=logits.device)
        places = torch.empty((rows, pieces), dtype=torch.int32, device=logits.device)
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
        if rows:
            largest_parts[(rows, pieces)](logits, logits.stride(0), size, part, tops, places, READ)
            most = min(-(-size // READ), 2 * self.num_sms)  # pieces of one row: no kernel for each number of rows
            join_largest[(rows,)](tops, places, pieces, tokens, finite, power_of_two(most), num_warps=1)
        return tokens, finite

    def sample(self, logits: torch.Tensor, options: SamplingOptions, uniforms: np.ndarray) -> torch.Tensor:
        """Three launches, six for few rows, or the two of `greedy` if no temperature is set."""
        if not options.temperature.any():
            return self.greedy(logits)
        with np.errstate(divide="ignore"):
            options = options._replace(min_p=np.log(options.min_p, dtype=np.float64))
        rows, size = logits.shape
        few = self.draw_key(rows) == "few rows"
        choice = self.tuned_configs.get("draw", self.draw_key(rows), PIECES if few else DRAW)
        warps, weigh, read = choice["num_warps"], choice["weigh"], choice["read"]
        given = self.from_numpy(np.array((*options, uniforms), np.float64))
        if not few or size <= weigh:
            return draw(logits, given, PART, 1, warps, weigh, read)
        part = -(-size * rows // (self.num_sms * weigh)) * weigh  # so that all pieces are looked at at once
        return draw(logits, given, part, choice["rounds"], warps, weigh, read)

    def draw_key(self, rows: int) -> str:
        """Return the key of `draw`'s tuned configuration: whether rows are split, with two multiprocessors for each."""
        return "few rows" if 2 * rows <= self.num_sms else "more rows"

    def top_logprobs(self, logits: torch.Tensor, chosen: torch.Tensor, k: int) -> TopLogprobs:
        """Sums are float32, in an order that does not depend on the batch."""
        rows, size = logits.shape
        k = min(int(k), size)
        pieces = -(-size // PART)
        tops, sums = torch.empty((2, rows, pieces), dtype=torch.float32, device=logits.device)
        larger = torch.empty((rows, pieces), dtype=torch.int32, device=logits.device)
        ids = torch.empty((rows, 1 + k), dtype=torch.int64, device=logits.device)
        logprobs = torch.empty((rows, 1 + k), dtype=torch.float32, device=logits.device)
        result = TopLogprobs(ids, logprobs, torch.empty(rows, dtype=torch.int64, device=logits.device))
        if rows:
            keys, stride = self._best(logits, k), logits.stride(0)
            sum_parts[(rows, pieces)](logits, stride, chosen, size, tops, sums, larger, PART, READ)
            found, width = (tops, sums, larger), power_of_two(pieces)
            join_sums[(rows,)](
                logits, stride, chosen, keys, k, found, pieces, result, PIECES=width, BLOCK=ENTRIES, num_warps=2
            )
        return result

    def _best(self, logits: torch.Tensor, k: int) -> torch.Tensor:
        """Return `order_keys` of the k largest logits of each row int64 [R, k], the lower id first among equals."""
        rows, size = logits.shape
        best = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
        if k == 0:
            return best
        at_once = max(1, MAX_ORDERED // size)
        for start in range(0, rows, at_once):
            piece = logits[start : start + at_once]
            keys = torch.empty(piece.shape, dtype=torch.int64, device=logits.device)
            order_keys[(piece.shape[0], -(-size // READ))](piece, piece.stride(0), size, keys, READ)
            best[start : start + at_once] = keys.topk(k, dim=1).values
        return best
