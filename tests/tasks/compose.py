"""The subset of `docker compose` that docs/guide/tasks.md needs, for machines without Docker: `run --rm`, `up -d` and `down` of
the services with Sterling's image.

A service gets its own root in user namespaces: the system's programs, the tested program instead of the image's entry point,
its volumes and files, `/tmp` if it is mounted, nothing else, and read-only if configured. The network is that of the machine:
the service listens on the host's port itself. Other images are not available here, and are skipped with a message."""

import argparse
import os
import re
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import yaml

SYSTEM = ("usr", "bin", "sbin", "lib", "lib64", "dev", "proc")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="docker")
    parser.add_argument("compose", choices=["compose"])
    parser.add_argument("-f", dest="file", type=pathlib.Path, required=True)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up").add_argument("-d", action="store_true", required=True)
    commands.add_parser("down")
    run = commands.add_parser("run")
    run.add_argument("--rm", action="store_true", required=True)
    run.add_argument("-v", dest="volumes", action="append", default=[])
    run.add_argument("service")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args()


def interpolated(file: pathlib.Path) -> dict:
    """Returns the services of a compose file, with `${NAME:-default}` replaced from the environment, or else from `.env`
    beside it."""
    beside = file.with_name(".env")
    known = dict(line.split("=", 1) for line in beside.read_text().splitlines()) if beside.exists() else {}
    fill = lambda found: (known | os.environ).get(found[1], found[2] or "")
    return yaml.safe_load(re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", fill, file.read_text()))["services"]


def check_build(service: dict, folder: pathlib.Path) -> None:
    """Checks that the image would be built from this clone."""
    context = (folder / service["build"]["context"]).resolve()
    for name in (service["build"]["dockerfile"], "Cargo.toml", "src/main.rs"):
        if not (context / name).is_file():
            sys.exit(f"build: {context} has no {name}")


def check_secrets(service: dict, folder: pathlib.Path) -> None:
    """Checks that secrets are unreadable for others, and readable for the container's user by one of its groups."""
    groups = {int(group) for group in service.get("group_add", [])}
    for volume in service.get("volumes", []):
        place = (folder / volume.split(":")[0]).resolve()
        for file in place.rglob("*") if place.is_dir() else [place]:
            if file.suffix == ".key" and file.stem != "ca" or file.name == "keys.toml":
                about = file.stat()
                if about.st_mode & 0o007 or not about.st_mode & 0o040 or about.st_gid not in groups:
                    sys.exit(f"{file}: mode {about.st_mode & 0o777:o} of group {about.st_gid}, expected 640 of one of {groups}")


def mounts(service: dict, volumes: list[str], folder: pathlib.Path, state: pathlib.Path) -> list[tuple[pathlib.Path, str, bool]]:
    """Returns source, target and writability of each volume."""
    found = []
    for volume in [*service.get("volumes", []), *volumes]:
        source, target, *mode = volume.split(":")
        is_path = source.startswith((".", "/"))
        place = (folder / source).resolve() if is_path else state / source
        if not is_path:
            place.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            sys.exit(f"volume {volume}: there is no {place}")
        found.append((place, target, mode != ["ro"]))
    # Nested mounts come after their parents.
    return sorted(found, key=lambda mount: mount[1])


def script(service: dict, seen: list[tuple[pathlib.Path, str, bool]], command: list[str]) -> str:
    """Returns the script that makes the root and enters it."""
    lines = ["set -e", "root=$(mktemp -d)", "mount -t tmpfs tmpfs $root"]
    for name in SYSTEM:
        place = pathlib.Path("/", name)
        if place.is_symlink():
            lines.append(f"ln -s {os.readlink(place)} $root/{name}")
        elif place.exists():
            lines.append(f"mkdir $root/{name}; mount --rbind /{name} $root/{name}")
    program = pathlib.Path(os.environ["STERLING_PROGRAM"])
    places = [(program, "/entry", False), *seen, *[(None, target, True) for target in service.get("tmpfs", [])]]
    for place, target, is_writable in places:
        inside = f'"$root"{shlex.quote(target)}'
        if place is None:
            lines.append(f"mkdir -p {inside}; mount -t tmpfs tmpfs {inside}")
            continue
        make = f"mkdir -p {inside}" if place.is_dir() else f"mkdir -p $(dirname {inside}); touch {inside}"
        lines.append(f"{make}; mount --bind {shlex.quote(str(place))} {inside}")
        if not is_writable:
            lines.append(f"mount -o remount,bind,ro {inside}")
    if service.get("read_only"):
        lines.append("mount -o remount,ro $root")
    lines.append(f"exec chroot $root /entry {shlex.join(command)}")
    return "\n".join(lines)


def start(service: dict, command: list[str], volumes: list[str], folder: pathlib.Path, state: pathlib.Path, log=None) -> subprocess.Popen:
    # The program gets only the environment of its service.
    environment = {"PATH": os.environ["PATH"]} | service.get("environment", {})
    for port in service.get("ports", []):
        host, inside = port.split(":")[-2:]
        config = "".join(place.read_text() for place, target, _ in mounts(service, [], folder, state) if target.endswith(".toml"))
        assert f':{inside}"' in config, f"port {port}: nothing listens on {inside}"
        ports = dict(pair.split("=") for pair in os.environ["TASKS_PORTS"].split(","))
        environment |= {"STERLING_LISTEN": f"127.0.0.1:{ports[host]}", "STERLING_ACCESS__ADMIN_LISTEN": f"127.0.0.1:{ports['admin']}"}
    text = script(service, mounts(service, volumes, folder, state), command)
    return subprocess.Popen(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", text], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
    )


def main() -> None:
    asked = arguments()
    folder = asked.file.resolve().parent
    state = folder / ".compose"
    state.mkdir(exist_ok=True)
    services = interpolated(asked.file)
    if asked.command == "run":
        service = services[asked.service]
        check_build(service, folder)
        sys.exit(start(service | {"ports": []}, asked.arguments, asked.volumes, folder, state).wait())
    if asked.command == "down":
        for pid in state.glob("*.pid"):
            os.kill(int(pid.read_text()), signal.SIGTERM)
            pid.unlink()
        return
    for name, service in services.items():
        check_secrets(service, folder)
        if service["image"] != "sterling":
            print(f"{name}: the image {service['image']} is not here", file=sys.stderr)
            continue
        check_build(service, folder)
        with open(state / f"{name}.log", "w") as log:
            process = start(service, service["command"], [], folder, state, log)
        time.sleep(1)
        if process.poll() is not None:
            sys.exit(f"{name} ended with {process.returncode}: {(state / f'{name}.log').read_text()}")
        (state / f"{name}.pid").write_text(str(process.pid))


if __name__ == "__main__":
    main()
