//! Finds the resources of this process on this machine (cores, memory and caches), and the facts that show whether two
//! ranks share a host. Reads `/proc` and `/sys` and makes a few system calls. Every answer is a local fact. So if ranks
//! must agree on something, it must not depend on one rank's answer alone (the rendezvous exchanges the answers first).

#![allow(unsafe_code)] // system calls that query facts

use std::fmt::Write as _;
use std::fs;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use once_cell::sync::Lazy;

use super::numa;

fn read_trimmed(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_string())
}

/// Returns the CPU on which the calling thread runs now.
pub fn current_cpu() -> Option<u32> {
    // SAFETY: takes no argument and accesses no memory.
    u32::try_from(unsafe { libc::sched_getcpu() }).ok()
}

/// Returns the CPUs on which the calling thread may run, as a bit mask in 64-bit words. Empty if the kernel does not
/// report them.
pub fn affinity_mask() -> Vec<u64> {
    // The kernel needs a buffer for all CPUs that it could have, and returns EINVAL if the buffer is too short.
    let mut words = 16usize;
    while words <= 1024 {
        let mut mask = vec![0u64; words];
        // SAFETY: the pointer and the length in bytes describe `mask`; the kernel writes at most that many bytes.
        let got = unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, words * 8, mask.as_mut_ptr()) };
        if got > 0 {
            mask.truncate((got as usize).div_ceil(8));
            while mask.last() == Some(&0) {
                mask.pop();
            }
            return mask;
        }
        if std::io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL) {
            break;
        }
        words *= 2;
    }
    Vec::new()
}

/// Returns the number of CPUs in a mask of `affinity_mask`.
pub fn count_mask(mask: &[u64]) -> usize {
    mask.iter().map(|word| word.count_ones() as usize).sum()
}

/// Returns how many of the CPUs that this process may use share a core. The CPUs of its first core count.
pub fn cpus_per_core() -> usize {
    static FOUND: Lazy<usize> = Lazy::new(|| {
        let mask = affinity_mask();
        let siblings = numa::first_of(&mask)
            .and_then(|cpu| read_trimmed(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")));
        siblings.map_or(1, |list| numa::count_of(&list, &mask).max(1))
    });
    *FOUND
}

/// Returns how many cores this process can keep busy, by its affinity mask and its CPU quota. At least 1.
pub fn usable_cores() -> usize {
    agreed_cores(&[affinity_mask()], quota_millicores())
}

/// Returns how many cores the processes with these masks can keep busy together. The smallest of their quotas applies
/// to all. At least 1.
pub fn agreed_cores(masks: &[Vec<u64>], smallest_quota_millicores: Option<u64>) -> usize {
    let words = masks.iter().map(Vec::len).max().unwrap_or(0);
    let mut union = vec![0u64; words];
    for mask in masks {
        for (all, one) in union.iter_mut().zip(mask) {
            *all |= one;
        }
    }
    let mut cores = count_mask(&union);
    if cores == 0 {
        // The kernel returned no mask, so use the standard library.
        cores = std::thread::available_parallelism().map(usize::from).unwrap_or(1);
    }
    if let Some(quota) = smallest_quota_millicores {
        // Rounded down: if the quota is 1.5 cores, two spinning threads would use it up and be throttled.
        cores = cores.min((quota / 1000) as usize);
    }
    cores.max(1)
}

/// Returns the smallest CPU quota of this process's control group and the group's ancestors, in thousandths of a core.
/// None if there is no quota.
pub fn quota_millicores() -> Option<u64> {
    quota_in(&ControlGroups::read())
}

/// Returns how many bytes can still be used before the machine or a control group runs out of memory. If a memfd is
/// populated past a control group's limit, the process is killed and gets no error, so this is checked before.
pub fn memory_headroom() -> Option<u64> {
    headroom_in(&ControlGroups::read())
}

/// Returns `quota_millicores` and `memory_headroom`, with only one read of the control groups, which saves half of the
/// cost.
pub fn limits() -> (Option<u64>, Option<u64>) {
    let groups = ControlGroups::read();
    (quota_in(&groups), headroom_in(&groups))
}

fn quota_in(groups: &ControlGroups) -> Option<u64> {
    let v1 = groups.ancestors("cpu").into_iter().filter_map(|dir| {
        let quota: i64 = read_trimmed(dir.join("cpu.cfs_quota_us"))?.parse().ok()?;
        let period: u64 = read_trimmed(dir.join("cpu.cfs_period_us"))?.parse().ok()?;
        u64::try_from(quota).ok().and_then(|quota| quota.saturating_mul(1000).checked_div(period))
    });
    let v2 = groups.ancestors("").into_iter().filter_map(|dir| parse_cpu_max(&read_trimmed(dir.join("cpu.max"))?));
    v1.chain(v2).min()
}

/// Parses `cpu.max` of cgroup v2: "max 100000" or "150000 100000".
fn parse_cpu_max(text: &str) -> Option<u64> {
    let mut words = text.split_whitespace();
    let quota: u64 = words.next()?.parse().ok()?;
    let period: u64 = words.next()?.parse().ok()?;
    quota.saturating_mul(1000).checked_div(period)
}

fn headroom_in(groups: &ControlGroups) -> Option<u64> {
    let v1 = groups
        .ancestors("memory")
        .into_iter()
        .filter_map(|dir| headroom(&dir, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"));
    let v2 = groups
        .ancestors("")
        .into_iter()
        .filter_map(|dir| headroom(&dir, "memory.max", "memory.current", "inactive_file"));
    v1.chain(v2).chain(available_memory()).min()
}

fn available_memory() -> Option<u64> {
    let kib: u64 = field(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    Some(kib.saturating_mul(1024))
}

/// Returns the number that follows `name` in a file of `name number` lines.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next()? == name).then(|| words.next())??.parse().ok()
    })
}

/// Returns the limit minus the usage of one control group. Inactive file pages count as free, because the kernel
/// reclaims them before it kills a process.
fn headroom(dir: &Path, limit: &str, usage: &str, reclaimable: &str) -> Option<u64> {
    let limit: u64 = read_trimmed(dir.join(limit))?.parse().ok()?; // "max" does not parse: no limit
    if limit >= 1 << 60 {
        return None; // v1 expresses "no limit" by a huge number
    }
    let usage: u64 = read_trimmed(dir.join(usage))?.parse().ok()?;
    let inactive =
        fs::read_to_string(dir.join("memory.stat")).ok().and_then(|text| field(&text, reclaimable)).unwrap_or(0);
    Some(limit.saturating_sub(usage.saturating_sub(inactive)))
}

/// The directories of this process's control groups.
struct ControlGroups {
    /// One entry for each group: its controller (empty for v2), the mount point, and this process's directory below the
    /// mount point.
    places: Vec<(String, PathBuf, PathBuf)>,
}

impl ControlGroups {
    /// Reads the control groups again at each call, because a process may be moved to another group. The mount points
    /// take ten times longer to read and do not change, so they are cached.
    fn read() -> ControlGroups {
        static MOUNTS: Lazy<String> = Lazy::new(|| {
            let all = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
            all.lines().filter(|line| line.contains(" - cgroup")).collect::<Vec<_>>().join("\n")
        });
        let cgroup = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        ControlGroups { places: control_group_places(&cgroup, &MOUNTS) }
    }

    /// Returns the directories for one controller, from that of this process's group up to the mount point.
    fn ancestors(&self, controller: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for (_, mount, dir) in self.places.iter().filter(|(name, ..)| name == controller) {
            for ancestor in dir.ancestors() {
                found.push(ancestor.to_path_buf());
                if ancestor == mount {
                    break;
                }
            }
        }
        found
    }
}

fn control_group_places(cgroup: &str, mounts: &str) -> Vec<(String, PathBuf, PathBuf)> {
    let mut places = Vec::new();
    for line in cgroup.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        // Only CPU and memory are needed. In v2 all controllers share one tree, whose name is empty.
        for controller in controllers.split(',').filter(|name| matches!(*name, "cpu" | "memory" | "")) {
            for (root, mount) in mounts.lines().filter_map(|line| control_group_mount(line, controller)) {
                // In a container the mount may show only a part of the tree. Then the root of that part is this
                // process's own group.
                let below = path.strip_prefix(root.trim_end_matches('/')).unwrap_or("").trim_start_matches('/');
                let outside = below.split('/').any(|part| part == "..");
                let mount = PathBuf::from(mount);
                let dir = if outside { mount.clone() } else { mount.join(below) };
                let dir = if dir.is_dir() { dir } else { mount.clone() };
                places.push((controller.to_string(), mount, dir));
            }
        }
    }
    places
}

/// If a mountinfo line mounts this controller, returns the root and the mount point. The empty name means the v2 tree.
fn control_group_mount<'a>(line: &'a str, controller: &str) -> Option<(&'a str, &'a str)> {
    let (front, back) = line.split_once(" - ")?;
    let front: Vec<&str> = front.split(' ').collect();
    let mut back = back.split(' ');
    let (kind, _, options) = (back.next()?, back.next()?, back.next()?);
    let matches = match controller {
        "" => kind == "cgroup2",
        _ => kind == "cgroup" && options.split(',').any(|option| option == controller),
    };
    matches.then_some((*front.get(3)?, *front.get(4)?))
}

/// Returns a value that changes at every boot. If it is equal on two ranks, they run on the same kernel. Empty if
/// unknown.
pub fn boot_id() -> String {
    read_trimmed("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

pub fn hostname() -> String {
    read_trimmed("/proc/sys/kernel/hostname").unwrap_or_else(|| "unknown host".into())
}

/// Returns the effective user. A peer sees this user on a socket.
pub fn uid() -> u32 {
    // SAFETY: takes no argument and always succeeds.
    unsafe { libc::geteuid() }
}

/// Returns the number of this process's network namespace. Abstract sockets are visible only within it. 0 if unknown.
pub fn netns() -> u64 {
    fs::metadata("/proc/self/ns/net").map(|data| data.ino()).unwrap_or(0)
}

/// Returns the number of this process's pid namespace, within which pids have the same meaning. 0 if unknown.
pub fn pidns() -> u64 {
    fs::metadata("/proc/self/ns/pid").map(|data| data.ino()).unwrap_or(0)
}

/// Returns facts about this machine for bug reports: names and values.
pub fn report() -> Vec<(String, String)> {
    let mut facts = Vec::new();
    let mut line = |name: &str, value: String| facts.push((name.to_string(), value));
    let mask = affinity_mask();
    line("cores", usable_cores().to_string());
    line("affinity", format!("{} CPUs ({})", count_mask(&mask), mask_as_list(&mask)));
    line("quota", quota_millicores().map_or("none".into(), |q| format!("{}.{:03} cores", q / 1000, q % 1000)));
    line("memory headroom", memory_headroom().map_or("unknown".into(), mebibytes));
    line("kernel", read_trimmed("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".into()));
    line("boot id", boot_id().chars().take(8).collect());
    line("/dev/shm", dev_shm());
    line("memfd", probe_memfd());
    line("pidfd", probe_pidfd());
    line("SO_PEERPIDFD", probe_peer_pidfd());
    for level in [2, 3] {
        line(&format!("L{level}"), cache(level).unwrap_or_else(|| "unknown".into()));
    }
    line("NUMA nodes", numa::described().unwrap_or_else(|| "unknown".into()));
    let accelerators = accelerators();
    line("accelerators", if accelerators.is_empty() { "none".into() } else { accelerators.join(", ") });
    line("fingerprint", fingerprint().into());
    facts
}

fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

/// Returns a mask as text, for instance "0-3,8".
fn mask_as_list(mask: &[u64]) -> String {
    let has = |cpu: usize| mask.get(cpu / 64).is_some_and(|word| word >> (cpu % 64) & 1 == 1);
    let mut list = String::new();
    let mut cpu = 0;
    while cpu < mask.len() * 64 {
        if has(cpu) {
            let first = cpu;
            while has(cpu + 1) {
                cpu += 1;
            }
            let comma = if list.is_empty() { "" } else { "," };
            let _ = if first == cpu { write!(list, "{comma}{first}") } else { write!(list, "{comma}{first}-{cpu}") };
        }
        cpu += 1;
    }
    list
}

/// Returns the size of CPU 0's data or unified cache of this level, and the CPUs that share this cache.
fn cache(level: u32) -> Option<String> {
    let (size, shared) = cache_of(level)?;
    Some(format!("{size} shared by CPUs {shared}"))
}

fn cache_of(level: u32) -> Option<(String, String)> {
    for index in 0..8 {
        let dir = PathBuf::from(format!("/sys/devices/system/cpu/cpu0/cache/index{index}"));
        let Some(found) = read_trimmed(dir.join("level")) else { continue };
        if found == level.to_string() && read_trimmed(dir.join("type"))? != "Instruction" {
            return Some((
                read_trimmed(dir.join("size"))?,
                read_trimmed(dir.join("shared_cpu_list")).unwrap_or_default(),
            ));
        }
    }
    None
}

/// Returns the size in bytes of CPU 0's last cache before memory. Read once per process.
pub fn last_level_cache() -> Option<u64> {
    static BYTES: Lazy<Option<u64>> =
        Lazy::new(|| [4, 3, 2].into_iter().find_map(cache_of).and_then(|(size, _)| kernel_size(&size)));
    *BYTES
}

/// Parses a size as sysfs writes it: "32768K" or "32M".
fn kernel_size(text: &str) -> Option<u64> {
    let (number, shift) = match text.strip_suffix(['K', 'M', 'G'].as_slice()) {
        Some(number) => (number, 10 * (1 + "KMG".find(&text[number.len()..])?)),
        None => (text, 0),
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Identifies this machine in measurements: processor, usable cores, caches. Read once per process.
pub fn fingerprint() -> &'static str {
    static TEXT: Lazy<String> = Lazy::new(|| {
        let mut text = format!("{}; {} cores", processor(), usable_cores());
        for level in [1, 2, 3] {
            if let Some((size, _)) = cache_of(level) {
                let _ = write!(text, "; L{level} {size}");
            }
        }
        text
    });
    &TEXT
}

/// Returns the processor's name. Only the first lines are read, because the kernel writes a paragraph for every CPU.
fn processor() -> String {
    let mut head = [0u8; 4096];
    let length = fs::File::open("/proc/cpuinfo").and_then(|mut file| file.read(&mut head)).unwrap_or(0);
    processor_in(&String::from_utf8_lossy(&head[..length]))
}

fn processor_in(cpuinfo: &str) -> String {
    let field = |name: &str| {
        let lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        lines.filter(|(found, _)| found.trim() == name).map(|(_, value)| value.trim().to_string()).next()
    };
    // On Arm there is no model name; there are numbers for implementer and part.
    let part = || Some(format!("CPU {} part {}", field("CPU implementer")?, field("CPU part")?));
    field("model name").or_else(part).unwrap_or_else(|| std::env::consts::ARCH.to_string())
}

/// Returns the accelerators of this host that their driver lists, one name per device. Empty if no driver is loaded.
pub fn accelerators() -> Vec<String> {
    let Ok(devices) = fs::read_dir("/proc/driver/nvidia/gpus") else { return Vec::new() };
    let about = devices.filter_map(|device| fs::read_to_string(device.ok()?.path().join("information")).ok());
    let mut names: Vec<String> = about
        .filter_map(|text| Some(text.lines().find_map(|line| line.strip_prefix("Model:"))?.trim().to_string()))
        .collect();
    names.sort();
    names
}

fn dev_shm() -> String {
    // SAFETY: an all-zero statvfs is valid, and the call fills it. The path ends in NUL.
    let (rc, stat) = unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        (libc::statvfs(c"/dev/shm".as_ptr(), &mut stat), stat)
    };
    if rc != 0 {
        return format!("not usable: {}", std::io::Error::last_os_error());
    }
    // The fields' widths differ between platforms.
    #[allow(clippy::unnecessary_cast)]
    let (size, free, block) = (stat.f_blocks as u64, stat.f_bavail as u64, stat.f_frsize as u64);
    format!("{}, {} free (not needed while memfd works)", mebibytes(size * block), mebibytes(free * block))
}

/// Converts the result of a system call that returns a descriptor.
fn descriptor(rc: i64) -> Result<OwnedFd, std::io::Error> {
    if rc < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this descriptor, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(rc as i32) })
}

fn availability(result: Result<OwnedFd, std::io::Error>, fallback: &str) -> String {
    match result {
        Ok(_) => "available".into(),
        Err(error) => format!("not available: {error}; {fallback}"),
    }
}

fn probe_memfd() -> String {
    // SAFETY: the name ends in NUL; the flags are plain numbers.
    let rc = unsafe { libc::syscall(libc::SYS_memfd_create, c"sagellm-probe".as_ptr(), libc::MFD_CLOEXEC) };
    availability(descriptor(rc), "a nameless file in /dev/shm is used instead")
}

fn probe_pidfd() -> String {
    // SAFETY: plain numbers in, a descriptor or -1 out.
    let rc = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) };
    availability(descriptor(rc), "the death of a rank is seen by its closed connection only")
}

fn probe_peer_pidfd() -> String {
    let result = std::os::unix::net::UnixStream::pair().and_then(|(one, _other)| peer_pidfd(&one));
    availability(result, "pidfd_open on the peer's pid is used instead")
}

/// `SO_PEERPIDFD` (Linux 6.5), which libc does not define yet.
const SO_PEERPIDFD: i32 = 77;

/// Returns a pidfd of the process at the other end of a unix socket. It refers to that process even if the process's
/// pid was reused.
pub fn peer_pidfd(socket: &impl AsRawFd) -> Result<OwnedFd, std::io::Error> {
    let mut fd: i32 = -1;
    let mut length = std::mem::size_of::<i32>() as libc::socklen_t;
    // SAFETY: `fd` and `length` outlive the call, and `length` is the size of `fd`.
    let rc = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, (&raw mut fd).cast(), &raw mut length)
    };
    if rc != 0 {
        return Err(std::io::Error::last_os_error());
    }
    descriptor(fd.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_limited_by_mask_and_quota() {
        assert_eq!(agreed_cores(&[vec![0b0110], vec![0b0011]], None), 3);
        assert_eq!(agreed_cores(&[vec![0xff]], Some(2500)), 2);
        assert_eq!(agreed_cores(&[vec![0xff]], Some(500)), 1);
        assert!(usable_cores() >= 1);
    }

    #[test]
    fn cpu_max_is_read() {
        assert_eq!(parse_cpu_max("max 100000"), None);
        assert_eq!(parse_cpu_max("150000 100000"), Some(1500));
        assert_eq!(parse_cpu_max("150000 0"), None);
        assert_eq!(parse_cpu_max(""), None);
    }

    #[test]
    fn control_groups_of_both_versions_are_found() {
        let cgroup = "4:cpu,cpuacct:/docker/abc\n0::/user.slice\nnonsense\n";
        let mounts = "31 24 0:27 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n\
                      32 24 0:28 / /nowhere/unified ro shared:1 - cgroup2 cgroup rw\nbad line\n";
        let places = control_group_places(cgroup, mounts);
        let names: Vec<&str> = places.iter().map(|(name, ..)| name.as_str()).collect();
        assert_eq!(names, ["cpu", ""], "cpuacct limits nothing");
        assert_eq!(places[0].1, PathBuf::from("/sys/fs/cgroup/cpu,cpuacct"));
        // If a directory does not exist, the mount point is used instead.
        assert_eq!(places[1].2, PathBuf::from("/nowhere/unified"));
    }

    #[test]
    fn memory_of_one_group() {
        let dir = std::env::temp_dir().join(format!("sagellm-topology-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("memory.max"), "1000\n").unwrap();
        fs::write(dir.join("memory.current"), "900\n").unwrap();
        fs::write(dir.join("memory.stat"), "anon 5\ninactive_file 300\n").unwrap();
        let found = headroom(&dir, "memory.max", "memory.current", "inactive_file");
        fs::write(dir.join("memory.max"), "max\n").unwrap();
        let unlimited = headroom(&dir, "memory.max", "memory.current", "inactive_file");
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(found, Some(400));
        assert_eq!(unlimited, None);
    }

    #[test]
    fn processors_are_named_and_sizes_of_the_kernel_are_read() {
        assert_eq!(processor_in("processor\t: 0\nmodel name\t: AMD EPYC\nmodel name\t: other\n"), "AMD EPYC");
        assert_eq!(processor_in("CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"), "CPU 0x41 part 0xd0c");
        assert_eq!(processor_in("nothing"), std::env::consts::ARCH);
        assert_eq!(kernel_size("32768K"), Some(32 << 20));
        assert_eq!(kernel_size("1G"), Some(1 << 30));
        assert_eq!(kernel_size("512"), Some(512));
        assert_eq!(kernel_size("x"), None);
        assert!(fingerprint().contains(" cores") && !fingerprint().contains('\n'));
    }

    #[test]
    fn masks_as_lists() {
        assert_eq!(mask_as_list(&[0b1011]), "0-1,3");
        assert_eq!(mask_as_list(&[1 << 63, 1]), "63-64");
        assert_eq!(mask_as_list(&[]), "");
    }

    #[test]
    fn the_report_has_every_line_once() {
        let report = report();
        for name in [
            "cores",
            "affinity",
            "quota",
            "memory headroom",
            "kernel",
            "boot id",
            "memfd",
            "pidfd",
            "L2",
            "NUMA nodes",
            "fingerprint",
        ] {
            let count = report.iter().filter(|(found, value)| found == name && !value.is_empty()).count();
            assert_eq!(count, 1, "{name} in {report:?}");
        }
        assert!(!boot_id().is_empty() && netns() != 0 && pidns() != 0);
    }
}
