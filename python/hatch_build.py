"""Packages the program and the model of the demo: a wheel contains `sterling` if there is a build, and is pure Python otherwise.

The program is `$STERLING_PROGRAM`, else `dist/sterling`, `release/sterling`, `quick/sterling` or `debug/sterling` of the clone's `target`, or
of `$CARGO_TARGET_DIR`. `$STERLING_PLATFORM` names a platform other than this machine's, such as `manylinux_2_28_x86_64`, for a
program that is known to run there (`scripts/build_wheel.sh`)."""

import os
import pathlib
import sysconfig

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: Build folders of cargo with the program, the fastest build first.
PROFILES = ("dist", "release", "quick", "debug")


class ProgramHook(BuildHookInterface):
    """Adds the program to the scripts of a wheel, and the demo's model to its data."""

    def initialize(self, version: str, build_data: dict) -> None:
        if version == "editable":
            return
        clone = pathlib.Path(self.root).parent
        targets = clone / os.environ.get("CARGO_TARGET_DIR", "target")
        built = next((path for profile in PROFILES if (path := targets / profile / "sterling").is_file()), None)
        given = os.environ.get("STERLING_PROGRAM")
        if given and not os.path.isfile(given):
            raise FileNotFoundError(f"STERLING_PROGRAM: got {given!r}, expected the program `sterling`")
        if not given and built is None:
            self.app.display_warning(
                f"the package has no program: {targets} has no {', '.join(f'{profile}/sterling' for profile in PROFILES)}. `publish` and `serve` then "
                "need `program=`, $STERLING or a `sterling` on PATH; build one and install again to have it in the package"
            )
            return
        platform = os.environ.get("STERLING_PLATFORM") or sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["shared_scripts"][given or str(built)] = "sterling"
        # `sterling demo` searches for it here.
        model = clone / "models/debian"
        for path in sorted(model.iterdir()):
            build_data["shared_data"][str(path)] = f"share/sterling/debian/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
