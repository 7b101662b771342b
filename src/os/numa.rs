//! The NUMA nodes and last-level caches of this machine, and on which node memory lies.

#![allow(unsafe_code)] // a system call that places memory

use std::path::Path;
use std::{fs, io};

use once_cell::sync::Lazy;

/// A node with its CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Node {
    number: u32,
    /// As the kernel writes them: "0-3,8-11".
    cpus: String,
}

/// The nodes of this machine, which do not change while a process runs.
static NODES: Lazy<Vec<Node>> = Lazy::new(|| read(Path::new("/sys/devices/system/node")));

fn read(directory: &Path) -> Vec<Node> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let node = |path: &Path| {
        let number = path.file_name()?.to_str()?.strip_prefix("node")?.parse().ok()?;
        Some(Node { number, cpus: fs::read_to_string(path.join("cpulist")).ok()?.trim().to_string() })
    };
    let mut nodes: Vec<Node> = entries.filter_map(|entry| node(&entry.ok()?.path())).collect();
    nodes.sort_unstable_by_key(|node| node.number);
    nodes
}

/// Returns the node to which a process with this affinity mask is bound (`topology::affinity_mask`). None if it may run
/// on several nodes, or if the kernel does not report them.
pub fn node_of(mask: &[u64]) -> Option<u32> {
    among(&NODES, mask)
}

fn among(nodes: &[Node], mask: &[u64]) -> Option<u32> {
    first_of(mask)?;
    nodes.iter().find(|node| holds(&mask_of(&node.cpus), mask)).map(|node| node.number)
}

/// Whether all CPUs of `mask` are in `all`.
fn holds(all: &[u64], mask: &[u64]) -> bool {
    mask.iter().enumerate().all(|(word, bits)| bits & !all.get(word).copied().unwrap_or(0) == 0)
}

/// Returns the first CPU of a mask.
pub fn first_of(mask: &[u64]) -> Option<u32> {
    let word = mask.iter().position(|word| *word != 0)?;
    Some(word as u32 * 64 + mask[word].trailing_zeros())
}

/// Returns the last-level cache that all CPUs of this affinity mask share, as the number of the first CPU that uses it.
/// None if they use several, or if the kernel does not report them.
pub fn cache_of(mask: &[u64]) -> Option<u32> {
    cache_in(Path::new("/sys/devices/system/cpu"), mask)
}

fn cache_in(cpus: &Path, mask: &[u64]) -> Option<u32> {
    let level = |cache: &Path| fs::read_to_string(cache.join("level")).ok()?.trim().parse::<u32>().ok();
    // At the last level there is one cache, or at level 1 two with the same users (data, instructions).
    let caches = fs::read_dir(cpus.join(format!("cpu{}/cache", first_of(mask)?))).ok()?;
    let caches = caches.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let (_, last) = caches.filter_map(|cache| Some((level(&cache)?, cache))).max()?;
    let users = mask_of(&fs::read_to_string(last.join("shared_cpu_list")).ok()?);
    if holds(&users, mask) { first_of(&users) } else { None }
}

/// Returns how many CPUs of a list, as the kernel writes it, are in a mask.
pub fn count_of(list: &str, mask: &[u64]) -> usize {
    mask_of(list).iter().zip(mask).map(|(one, other)| (one & other).count_ones() as usize).sum()
}

/// No machine has so many CPUs or nodes, and masks must stay small.
const MOST_CPUS: usize = 1 << 16;
const MOST_NODES: usize = 1 << 16;

/// The mask of a list of CPUs. Ignores what is no number.
fn mask_of(list: &str) -> Vec<u64> {
    let mut mask: Vec<u64> = Vec::new();
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (Ok(first), Ok(last)) = (first.trim().parse::<usize>(), last.trim().parse::<usize>()) else { continue };
        for cpu in first..=last.min(MOST_CPUS - 1) {
            if mask.len() <= cpu / 64 {
                mask.resize(cpu / 64 + 1, 0);
            }
            mask[cpu / 64] |= 1 << (cpu % 64);
        }
    }
    mask
}

/// Returns the nodes with their CPUs: "0: CPUs 0-3, 1: CPUs 4-7". None if the kernel does not report them.
pub fn described() -> Option<String> {
    let texts: Vec<String> = NODES.iter().map(|node| format!("{}: CPUs {}", node.number, node.cpus)).collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}

/// Asks the kernel to place the pages of a mapping on `node` when they are populated, if that node has room. `address`
/// must be a multiple of the page size. Changes no contents, and no page that is present.
///
/// # Safety
/// The range must be in a mapping of the caller.
pub unsafe fn prefer(address: *mut u8, bytes: usize, node: u32) -> io::Result<()> {
    const MPOL_PREFERRED: i32 = 1;
    if node as usize >= MOST_NODES {
        return Err(io::Error::from(io::ErrorKind::InvalidInput)); // a peer sent the number
    }
    let mut nodes = vec![0u64; node as usize / 64 + 1];
    nodes[node as usize / 64] = 1 << (node % 64);
    // The kernel reads one bit less than this number says.
    let bits = nodes.len() * 64 + 1;
    // SAFETY: the caller vouches for the range, and the kernel reads `bits - 1` bits of `nodes`.
    let rc = unsafe { libc::syscall(libc::SYS_mbind, address, bytes, MPOL_PREFERRED, nodes.as_ptr(), bits, 0) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two nodes with the CPUs of a machine that has two threads per core, and a node that has memory only.
    fn machine() -> tempfile::Faked {
        tempfile::Faked::new(&[("node0", "0-3,64-67"), ("node1", "4-7,68-71"), ("node2", ""), ("possible", "0-2")])
    }

    mod tempfile {
        use std::fs;
        use std::path::PathBuf;

        pub struct Faked(pub PathBuf);

        impl Faked {
            pub fn new(nodes: &[(&str, &str)]) -> Faked {
                let name = format!("sagellm-numa-{}-{:?}", std::process::id(), std::thread::current().id());
                let directory = std::env::temp_dir().join(name);
                for (name, cpus) in nodes {
                    fs::create_dir_all(directory.join(name)).unwrap();
                    fs::write(directory.join(name).join("cpulist"), format!("{cpus}\n")).unwrap();
                }
                Faked(directory)
            }
        }

        impl Drop for Faked {
            fn drop(&mut self) {
                let _ = fs::remove_dir_all(&self.0);
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no files")]
    fn a_mask_belongs_to_the_node_that_has_all_of_its_cpus() {
        let faked = machine();
        let nodes = read(&faked.0);
        assert_eq!(nodes.iter().map(|node| node.number).collect::<Vec<_>>(), [0, 1, 2]);
        for (mask, node) in [
            (vec![0b1111, 0b1111], Some(0)),
            (vec![0b0100], Some(0)),
            (vec![0b1000_0000], Some(1)),
            (vec![0, 0b1_0000], Some(1)),
            (vec![0b1_1000], None),
            (vec![0, 1 << 40], None),
            (vec![], None),
            (vec![0], None),
        ] {
            assert_eq!(among(&nodes, &mask), node, "{mask:?}");
        }
        assert_eq!(among(&[], &[1]), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no files")]
    fn a_mask_belongs_to_the_last_level_cache_that_all_of_its_cpus_use() {
        let faked = tempfile::Faked::new(&[]);
        let cache = |cpu: u32, index: u32, level: u32, users: &str| {
            let directory = faked.0.join(format!("cpu{cpu}/cache/index{index}"));
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("level"), format!("{level}\n")).unwrap();
            fs::write(directory.join("shared_cpu_list"), format!("{users}\n")).unwrap();
        };
        for cpu in [0, 4, 5, 64] {
            cache(cpu, 0, 1, &cpu.to_string());
            cache(cpu, 1, 3, if cpu == 4 || cpu == 5 { "4-7" } else { "0-3,64-67" });
            cache(cpu, 2, 2, &cpu.to_string());
        }
        fs::create_dir_all(faked.0.join("cpu8/cache/index0")).unwrap();
        cache(10, 0, 3, "nonsense");
        cache(11, 0, 3, "0-3");
        for (mask, cache) in [
            (vec![0b0001], Some(0)),
            (vec![0b1111, 0b1111], Some(0)),
            (vec![0, 0b0001], Some(0)),
            (vec![0b0011_0000], Some(4)),
            (vec![0b0001_0001], None),
            (vec![0b1_0000, 1], None),
            (vec![1 << 8], None),
            (vec![1 << 9], None),
            (vec![1 << 10], None),
            (vec![1 << 11], None),
            (vec![], None),
        ] {
            assert_eq!(cache_in(&faked.0, &mask), cache, "{mask:?}");
        }
    }

    #[test]
    fn lists_of_cpus_are_read_as_the_kernel_writes_them() {
        assert_eq!(mask_of("0-2,64"), [0b111, 1]);
        assert_eq!(mask_of("5"), [1 << 5]);
        assert_eq!(mask_of(""), [0u64; 0]);
        assert_eq!(mask_of("nonsense,1"), [2]);
        assert_eq!(mask_of("1,18446744073709551615,9999999-99999999"), [2]);
        assert_eq!(mask_of("0-18446744073709551615").len(), MOST_CPUS / 64);
        assert_eq!((count_of("0,64", &[1, 1]), count_of("0,64", &[3]), count_of("1", &[1])), (2, 1, 0));
    }
}
