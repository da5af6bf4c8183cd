"""Takes the program and the demo's model along: a wheel has `sterling` where there is one, and is pure Python where there is none.

The program is what `$STERLING_PROGRAM` names, else `target/release/sterling` or `target/quick/sterling` of the clone. `$STERLING_PLATFORM` names another platform than this machine's, such
as `manylinux_2_28_x86_64`, for a program that is known to start there (`scripts/build_wheel.sh`)."""

import os
import pathlib
import sysconfig

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProgramHook(BuildHookInterface):
    """Adds the program to the scripts of a wheel, and the demo's model to its data."""

    def initialize(self, version: str, build_data: dict) -> None:
        if version == "editable":
            return
        targets = pathlib.Path(self.root).parent / "target"
        built = next((path for profile in ("release", "quick") if (path := targets / profile / "sterling").is_file()), None)
        given = os.environ.get("STERLING_PROGRAM")
        if given and not os.path.isfile(given):
            raise FileNotFoundError(f"STERLING_PROGRAM: got {given!r}, expected the program `sterling`")
        if not given and built is None:
            self.app.display_warning(
                f"the package has no program: {targets}/release/sterling and {targets}/quick/sterling are missing. `publish` and `serve` then need "
                "`program=`, $STERLING or a `sterling` on PATH; build one and install again to have it in the package"
            )
            return
        platform = os.environ.get("STERLING_PLATFORM") or sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["shared_scripts"][given or str(built)] = "sterling"
        # Where `sterling demo` looks for it.
        model = pathlib.Path(self.root).parent / "models/debian"
        for path in sorted(model.iterdir()):
            build_data["shared_data"][str(path)] = f"share/sterling/debian/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
