"""Change settings in a running conversation, and report what changed and what was evicted."""

from __future__ import annotations

from collections.abc import Collection

from sirchat.chat.events import Event, Evicted, Notice, Pinned, Restored, Switched, TurnDone
from sirchat.chat.session import Session
from sirchat.chat.settings import hint_for_fixed, options_of
from sirchat.config.profile import FIXED, Profile
from sirchat.config.profile_files import list_profiles, load_profile, resolve
from sirchat.config.values import allowed, as_typed, is_option, parse_option, parse_value
from sirchat.errors import SettingError, format_value, nearest
from sirchat.memory.policies import import_typed
from sirchat.ui.interrupt import Interrupt
from sirchat.ui.screen import Screen
from sirchat.ui.text import shorten

_SCREEN_SETTINGS = ("panel", "theme", "markdown", "thinking")
"""Settings that another profile leaves alone unless it names them."""

_CACHE_SETTINGS = (
    *("policy", "policy_options", "budget", "sinks", "recent", "decay"),
    *("system", "pin_system", "protect", "evict", "recall", "recall_n"),
)
"""Settings that can change what is held; a report of it follows their change."""


class Switching:
    """Applies the changes that a command asks for, and reports them.

    `trusted` are the `module:Class` policies that profiles may name.
    """

    def __init__(self, session: Session, screen: Screen, trusted: Collection[str] = ()) -> None:
        self._trusted = trusted
        self._session = session
        self._screen = screen

    def setting(self, source: str, name: str, text: str) -> None:
        """Set a setting, or an option of the policy, to the value in `text`.

        Without text, show the current value. Raises SettingError, which names `source`.
        """
        profile = self._session.profile
        self._refuse_unknown(name)
        if not text:
            self._screen.note(f"{name} is {as_typed(getattr(profile, name))}")
        elif is_option(name, text, profile.policy):
            options = {**profile.policy_options, name: parse_option(text)}
            self._apply(source, f"{name} is {text} already", policy_options=options)
        else:
            value = parse_value(name, text)
            if name == "policy":
                import_typed(str(value))
            self._apply(source, f"{name} is {as_typed(value)} already", **{name: value})

    def policy(self, name: str, options: list[str]) -> None:
        """Switch to another policy, or change the options of the current one."""
        import_typed(name)
        updates: dict[str, object] = {"policy": name}
        if options:
            updates["policy_options"] = parse_value("policy_options", ",".join(options))
        self._apply("/policy", f"policy is {name} already", **updates)

    def profile(self, name: str) -> None:
        """Apply a whole profile; settings it does not name go back to the user's default.

        Settings fixed for the conversation stay, with a note; so do those of the screen, without.
        """
        if not name:
            names = ", ".join(profile.name for profile in list_profiles())
            self._screen.note(f"profiles: {names}")
            return
        current = self._session.profile
        trusted = [*self._trusted, current.policy]
        named, profile = load_profile(name, trusted), resolve(name, {"trust_policy": trusted}, {})
        kept = {*FIXED, *(key for key in _SCREEN_SETTINGS if key not in named)}
        values = {k: v for k, v in profile.model_dump().items() if k not in kept}
        self._apply("/profile", f"the settings are those of {name} already", **values)
        for key in FIXED:
            old, new = getattr(current, key), getattr(profile, key)
            if key in named and key != "description" and old != new:
                self._screen.note(
                    f"{key} stays {as_typed(old)}, not {as_typed(new)}: {hint_for_fixed(key, new)}"
                )

    def pin(self, target: str, *, pinned: bool, around: int = 0) -> None:
        """Pin or unpin the tokens that `target` names, and report what left or came back.

        `around`: so many tokens beside them are meant, too.
        """
        evicted = restored = 0
        for event in self._session.pin(target, pinned, around):
            if isinstance(event, Evicted):
                evicted += len(event.positions)
            elif isinstance(event, Restored):
                restored += len(event.positions)
            elif isinstance(event, Pinned):
                what = "pinned" if event.pinned else "no longer pinned"
                self._screen.note(f"{event.tokens:,} tokens {what}")
            else:
                self._report(event)
        self._report_moved(evicted, restored)

    def describe(self, name: str) -> str:
        """A setting, or an option of the policy: its value, and the allowed values."""
        profile = self._session.profile
        self._refuse_unknown(name)
        if name in Profile.model_fields:
            field = Profile.model_fields[name]
            value = as_typed(getattr(profile, name))
            return f"{name} is {value}: {field.description} It is {allowed(name)}."
        option = profile.policy_options.get(name, "at its default")
        return f"{name} is {as_typed(option)}: an option of policy {profile.policy}"

    def _refuse_unknown(self, name: str) -> None:
        """Raise SettingError unless `name` is a setting or an option of the policy."""
        options = options_of(self._session.profile.policy)
        known = [*Profile.model_fields, *(option.name for option in options)]
        if name not in known:
            hint = nearest(name, known) or "/show lists them"
            raise SettingError(f"there is no setting {format_value(name)}", hint=hint)

    def _apply(self, source: str, otherwise: str, **updates: object) -> None:
        """Switch, and report changes and evictions; `otherwise` is the note if nothing changed."""
        changed: list[str] = []
        evicted = restored = 0
        with Interrupt() as interrupted:
            for event in self._session.switch(source, interrupted, **updates):
                self._report(event)
                if isinstance(event, Switched):
                    changed.append(event.what)
                    restored += event.restored
                elif isinstance(event, Evicted):
                    evicted += len(event.positions)
        self._screen.use_theme(self._session.profile.theme)
        if not changed:
            self._screen.note(otherwise)
        elif set(changed) & set(_CACHE_SETTINGS):
            self._report_moved(evicted, restored)

    def _report_moved(self, evicted: int, restored: int) -> None:
        """Report how many tokens were evicted and restored, and how many are held now."""
        now = f"holds {self._session.resident:,}/{self._session.budget:,}"
        left = [f"forgot {evicted:,}" if evicted else "nothing forgotten"]
        came = [f"{restored:,} came back"] if restored else []
        self._screen.note(", ".join([*left, *came, now]))

    def _report(self, event: Event) -> None:
        if isinstance(event, Switched):
            old, new = (shorten(as_typed(value), 60) for value in (event.old, event.new))
            self._screen.note(f"{event.what}: {old} -> {new}")
        elif isinstance(event, TurnDone):
            self._screen.note(f"the system prompt was read: {event.tokens_in:,} tokens")
        elif isinstance(event, Notice):
            self._screen.note(event.text)
