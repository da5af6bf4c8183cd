//! Memory limit of this process's cgroups: the limits of its own cgroup and of all cgroups above it, in cgroup v1 and v2.

use std::path::{Path, PathBuf};

/// File that holds the memory limit of a cgroup, by cgroup version.
const LIMIT_V1: &str = "memory.limit_in_bytes";
const LIMIT_V2: &str = "memory.max";

/// Returns the limit in bytes, if any cgroup has one.
pub(super) fn process_limit() -> Option<u64> {
    cgroup_limit(Path::new("/"))
}

/// Computes the limit from the files under `root`.
fn cgroup_limit(root: &Path) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(root.join(name)).unwrap_or_default();
    let (groups, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let limits = groups.lines().filter_map(Group::parse).filter_map(|group| group.limit(root, &mounts));
    limits.min()
}

/// A line of `/proc/self/cgroup`: `0::/a/b` of version 2, `4:memory:/a/b` of version 1.
struct Group<'a> {
    path: &'a str,
    is_v2: bool,
}

impl<'a> Group<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut parts = line.splitn(3, ':');
        let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let is_v2 = number == "0" && controllers.is_empty();
        let is_of_memory = controllers.split(',').any(|controller| controller == "memory");
        (is_v2 || is_of_memory).then_some(Group { path, is_v2 })
    }

    /// Returns the lowest limit of the cgroup and its mounted ancestors.
    fn limit(&self, root: &Path, mounts: &str) -> Option<u64> {
        let (mounted, at) = mounts.lines().find_map(|line| self.mount(line))?;
        let top = root.join(at.trim_start_matches('/'));
        // A container may see its cgroup as the root, or under a path that is not mounted in the container.
        let below = Path::new(self.path).strip_prefix(mounted).unwrap_or(Path::new(""));
        let is_inside = below.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        let own: PathBuf = if is_inside { top.join(below) } else { top.clone() };
        let file = if self.is_v2 { LIMIT_V2 } else { LIMIT_V1 };
        let groups = own.ancestors().take_while(|folder| folder.starts_with(&top));
        // `max` does not parse: it means no limit.
        groups.filter_map(|folder| std::fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()).min()
    }

    /// Returns the mounted root of the hierarchy and its mount point, from a line of `/proc/self/mountinfo` that belongs to this
    /// hierarchy.
    fn mount<'m>(&self, line: &'m str) -> Option<(&'m str, &'m str)> {
        let (before, behind) = line.split_once(" - ")?;
        let mut behind = behind.split(' ');
        let (kind, options) = (behind.next()?, behind.nth(1)?);
        let is_it = match kind {
            "cgroup2" => self.is_v2,
            "cgroup" => !self.is_v2 && options.split(',').any(|option| option == "memory"),
            _ => false,
        };
        let mut fields = before.split(' ').skip(3);
        is_it.then_some((fields.next()?, fields.next()?))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const V2: &str = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate";
    const V1: &str = "36 32 0:33 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory";
    const OTHERS: &str =
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n33 32 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu";

    fn found(groups: &str, mounts: &str, files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        let all = [("proc/self/cgroup", groups), ("proc/self/mountinfo", mounts)];
        for (name, text) in all.iter().chain(files) {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        cgroup_limit(root.path())
    }

    #[test]
    fn the_lowest_limit_of_a_cgroup_and_its_parents_applies() {
        let mounts = format!("{OTHERS}\n{V2}");
        let unit = "0::/system.slice/sterling.service\n";
        let limits = |own, slice, top| {
            let files = [
                ("sys/fs/cgroup/system.slice/sterling.service/memory.max", own),
                ("sys/fs/cgroup/system.slice/memory.max", slice),
                ("sys/fs/cgroup/memory.max", top),
                ("sys/fs/cgroup/other.slice/memory.max", "1\n"),
            ];
            found(unit, &mounts, &files)
        };
        assert_eq!(limits("4096\n", "max\n", "max\n"), Some(4096), "MemoryMax= of a unit");
        assert_eq!(limits("max\n", "2048\n", "max\n"), Some(2048), "of its slice");
        assert_eq!(limits("4096\n", "2048\n", "1024\n"), Some(1024));
        assert_eq!(limits("max\n", "max\n", "max\n"), None);
        assert_eq!(found(unit, OTHERS, &[]), None, "not mounted");
        assert_eq!(found("", "", &[]), None);
    }

    #[test]
    fn containers_see_their_cgroup_as_the_root_or_not_at_all() {
        let limit = [("sys/fs/cgroup/memory.max", "512\n")];
        assert_eq!(found("0::/\n", V2, &limit), Some(512));
        // Without a cgroup namespace, the path is the host's, and only a subtree of it is mounted.
        let mount = V2.replace("0:26 / ", "0:26 /docker/abc ");
        assert_eq!(found("0::/docker/abc\n", &mount, &limit), Some(512));
        assert_eq!(found("0::/../other\n", V2, &limit), Some(512));
    }

    #[test]
    fn cgroups_of_version_1_are_limited_by_their_controller() {
        let groups = "12:cpu,cpuacct:/a\n7:memory:/docker/abc\n0::/docker/abc\n";
        let files = [
            ("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "700\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/cpu/docker/abc/memory.limit_in_bytes", "1\n"),
        ];
        assert_eq!(found(groups, &format!("{OTHERS}\n{V1}"), &files), Some(700));
        assert_eq!(found(groups, &format!("{OTHERS}\n{V1}"), &files[1..]), Some(9_223_372_036_854_771_712));
    }
}
