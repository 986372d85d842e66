"""The model that a profile asks for."""

from __future__ import annotations

from sirchat.config.profile import Profile
from sirchat.models.compiling import use_compiled
from sirchat.models.model import LoadedModel, load_model
from sirchat.models.progress import Progress


def load_of(
    profile: Profile, *, trust_remote_code: bool = False, progress: Progress | None = None
) -> LoadedModel:
    """Load the model of a profile, with its compiled decode step as the profile says.

    `progress` is called with the progress of loading. Raises ModelError as `load_model` and
    `use_compiled` do.
    """
    model = load_model(
        profile.model,
        device=profile.device,
        dtype=profile.dtype,
        threads=profile.threads,
        quantize=profile.quantize,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    use_compiled(model, profile.compile, progress)
    return model
