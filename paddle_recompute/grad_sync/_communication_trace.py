"""When the gradients of one step were ready and when they were sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BucketTimes:
    """Times of one bucket, in seconds of this process's ``time.perf_counter``.

    Attributes:
        number: Place in the order in which buckets are sent, from 0.
        num_bytes: Its size as it is sent: with bf16 compression half of what the gradients take.
        queued: When its last gradient was ready and it was handed over to be sent.
        started: When its all-reduce began, all ranks being ready for it; None where a device
            runs it on a stream of its own (NCCL), which the host does not see.
        ended: When the sum was there; None as for `started`.
    """

    number: int
    num_bytes: int
    queued: float
    started: float | None
    ended: float | None


@dataclass(frozen=True)
class CommunicationTrace:
    """One synchronized step, for a picture of computation and communication side by side.

    Attributes:
        began: When ``last_backward()`` was entered; a forward inside of it comes first.
        first_gradient: When the first gradient was complete; None if no hook fired.
        backward_ended: When the body of ``last_backward()`` ended.
        ended: When every ``.grad`` held its mean.
        buckets: In the order in which they were sent. A step that had to send everything again
            (its graph had changed) shows the second sending.
    """

    began: float
    first_gradient: float | None
    backward_ended: float
    ended: float
    buckets: tuple[BucketTimes, ...]

    @property
    def exposed(self) -> float | None:
        """Seconds after the backward in which buckets were on their way, without the waiting for a
        rank that computes longer; None where the host does not see that (NCCL, mode ``fleet``).
        """
        total = 0.0
        for bucket in self.buckets:
            if bucket.started is None or bucket.ended is None:
                return None
            total += max(0.0, bucket.ended - max(bucket.started, self.backward_ended))
        return total if self.buckets else None
