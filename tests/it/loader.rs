//! How libraries are found, and the errors if they are not. Uses small C libraries that the tests build, and the real
//! NCCL of a PyTorch with CUDA, which can be loaded without a GPU.
//!
//! Environment variables belong to the whole process, so each test that sets a variable runs in a child of this
//! program.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::common::this_program;
use sagellm::engine::device::{Hints, Vendor, open, open_runtime};

/// Returns a folder of this process; its name contains the pid, so that processes do not share it.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("vendor-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    })
}

/// Builds a shared library from C.
fn build(name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let (code, library) = (folder().join(format!("{name}.c")), folder().join(name));
    std::fs::write(&code, source).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let status = Command::new(&compiler).args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&code).args(flags).status();
    assert!(status.as_ref().is_ok_and(|status| status.success()), "{compiler} could not build {name}: {status:?}");
    library
}

fn at(path: &Path) -> Hints {
    Hints { path: Some(path.into()), ..Hints::default() }
}

fn error_of(vendor: Vendor, hints: &Hints) -> String {
    open(vendor, hints).map(|api| api.describe()).unwrap_err().to_string()
}

const NCCL: &str = "int ncclGetVersion(int *v) { *v = VERSION; return 0; }\n\
    int ncclGetUniqueId(unsigned char *id) { for (int i = 0; i < 128; i++) id[i] = i; return ID_CODE; }\n\
    const char *ncclGetErrorString(int code) { return code == 3 ? \"internal error\" : \"unknown\"; }\n\
    const char *ncclGetLastError(void *comm) { return \"the disk is on fire\"; }\n";

#[test]
fn a_named_library_is_the_only_one_that_is_tried() {
    let text = error_of(Vendor::Nccl, &at(Path::new("/no/such/libnccl.so.2")));
    assert!(text.starts_with("sagellm: NCCL was not found. Tried: /no/such/libnccl.so.2: cannot open"), "{text}");
    assert!(text.ends_with("named by the option vendor or by SAGELLM_NCCL_LIBRARY, so no other was tried."), "{text}");
}

#[test]
fn a_missing_library_is_an_error_with_what_was_tried_and_the_fix() {
    for (vendor, name, fix) in
        [(Vendor::Hccl, "libhccl.so", "set_env.sh"), (Vendor::Cncl, "libcncl.so.1", "$NEUWARE_HOME/lib64")]
    {
        let text = error_of(vendor, &Hints::default());
        assert!(text.contains("was not found. Tried: ") && text.contains(name) && text.contains(fix), "{text}");
        let variable = format!("name its file in SAGELLM_{}_LIBRARY.", vendor.name().to_uppercase());
        assert!(text.ends_with(&variable), "{text}");
    }
    for (vendor, name) in [(Vendor::Hccl, "libascendcl.so"), (Vendor::Cncl, "libcnrt.so")] {
        let text = open_runtime(vendor, &Hints::default()).err().unwrap().to_string();
        assert!(text.contains("runtime was not found. Tried: ") && text.contains(name), "{text}");
    }
}

#[test]
fn what_is_no_library_is_refused_by_name() {
    let file = folder().join("text.so");
    std::fs::write(&file, "this is no library\n").unwrap();
    let text = error_of(Vendor::Nccl, &at(&file));
    assert!(text.contains("text.so") && text.contains("Tried: "), "{text}");
    let empty = build("libempty.so", "int nothing_of_use;\n", &[]);
    for (vendor, symbol) in
        [(Vendor::Nccl, "ncclGetVersion"), (Vendor::Hccl, "HcclGetRootInfo"), (Vendor::Cncl, "cnclGetLibVersion")]
    {
        let text = error_of(vendor, &at(&empty));
        assert!(text.contains(&format!("libempty.so) has no {symbol}; a newer version")), "{text}");
    }
}

#[test]
fn an_old_version_is_refused_with_the_version_found_and_the_one_needed() {
    let old = build("libnccl-old.so", NCCL, &["-DVERSION=21005", "-DID_CODE=0"]);
    let text = error_of(Vendor::Nccl, &at(&old));
    assert!(text.contains("NCCL 2.10.5 (") && text.contains("libnccl-old.so"), "{text}");
    assert!(text.contains("2.18.0 or newer is needed; update PyTorch"), "{text}");
    let old = "int cnclGetLibVersion(int *a, int *b, int *c) { *a = 0; *b = 9; *c = 3; return 0; }\n";
    let text = error_of(Vendor::Cncl, &at(&build("libcncl-old.so", old, &[])));
    assert!(text.contains("CNCL 0.9.3 (") && text.contains("is too old"), "{text}");
}

#[test]
fn symbols_are_optional_and_a_missing_one_is_an_error_when_it_is_needed() {
    let some = build("libnccl-some.so", NCCL, &["-DVERSION=22805", "-DID_CODE=0"]);
    let api = open(Vendor::Nccl, &at(&some)).unwrap();
    assert_eq!(api.describe(), format!("NCCL 2.28.5 ({})", some.display()));
    let able = api.capabilities();
    assert!(!able.gather && !able.split && !able.shrink && able.missing.contains(&"ncclAllReduce"));
    assert_eq!(api.unique_id().unwrap(), (0..128).collect::<Vec<u8>>());
    assert_eq!(api.describe_error(3), "internal error (ncclResult_t 3)");
    let error = build("libnccl-error.so", NCCL, &["-DVERSION=22805", "-DID_CODE=3"]);
    let text = open(Vendor::Nccl, &at(&error)).unwrap().unique_id().unwrap_err().to_string();
    assert_eq!(
        text,
        "sagellm: NCCL 2.28.5 failed in ncclGetUniqueId: internal error (ncclResult_t 3); it says: the disk is on fire"
    );
}

#[test]
fn the_second_library_of_hccl_is_found_beside_the_first() {
    let folder_of_two = folder().join("cann9");
    std::fs::create_dir_all(&folder_of_two).unwrap();
    let operators = "int HcclAllReduce(void) { return 0; } int HcclBatchSendRecv(void) { return 0; }\n";
    let management = "int HcclGetRootInfo(unsigned char *id) { for (int i = 0; i < 4108; i++) id[i] = 7; return 0; }\n\
        int HcclCommDestroy(void *c) { return 0; }\n";
    let first = build("cann9/libhccl-simulated.so", operators, &[]);
    build("cann9/libhcomm.so", management, &["-Wl,-soname,libhcomm-simulated.so"]);
    let api = open(Vendor::Hccl, &at(&first)).unwrap();
    assert_eq!(api.unique_id().unwrap(), vec![7; 4108]);
    let able = api.capabilities();
    assert!(!able.all_to_all_v && !able.scatter && able.missing.contains(&"HcclBroadcast"));
    // One library that has the functions of both libraries.
    let both = build("libhccl-one.so", &format!("{operators}{management}"), &[]);
    assert_eq!(open(Vendor::Hccl, &at(&both)).unwrap().unique_id().unwrap().len(), 4108);
}

#[test]
fn ids_have_the_vendors_own_length() {
    let source = "struct id { char data[128]; unsigned long long hash; };\n\
        int cnclGetLibVersion(int *a, int *b, int *c) { *a = 1; *b = 25; *c = 0; return 0; }\n\
        int cnclGetCliqueId(struct id *id) { for (int i = 0; i < 128; i++) id->data[i] = i; id->hash = 0x0807060504030201; return 0; }\n";
    let api = open(Vendor::Cncl, &at(&build("libcncl-id.so", source, &[]))).unwrap();
    let expected: Vec<u8> = (0..128).chain(1..9).collect();
    assert_eq!(api.unique_id().unwrap(), expected);
    assert_eq!(api.capabilities().name, "CNCL 1.25.0");
}

/// Runs one test of this program again in a new process, with these variables.
fn in_child(test: &str, variables: &[(&str, &Path)]) {
    let mut child = this_program(module_path!(), test);
    child.env("SAGELLM_TEST_CHILD", "1");
    variables.iter().for_each(|(name, value)| _ = child.env(name, value));
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

fn is_child() -> bool {
    std::env::var_os("SAGELLM_TEST_CHILD").is_some()
}

#[test]
fn a_variable_names_the_file_and_another_a_folder() {
    if is_child() {
        let found = open(Vendor::Cncl, &Hints::default()).unwrap().describe();
        let expected = std::env::var("SAGELLM_TEST_EXPECTED").unwrap();
        assert_eq!(found, expected);
        return;
    }
    let source = |minor: u8| {
        format!("int cnclGetLibVersion(int *a, int *b, int *c) {{ *a = 1; *b = {minor}; *c = 0; return 0; }}\n")
    };
    let named = build("libcncl-named.so", &source(20), &[]);
    std::fs::create_dir_all(folder().join("usual")).unwrap();
    let usual = build("usual/libcncl.so.1", &source(21), &[]);
    let me = "a_variable_names_the_file_and_another_a_folder";
    let expected = format!("CNCL 1.20.0 ({})", named.display());
    let both = [
        ("SAGELLM_CNCL_LIBRARY", named.as_path()),
        ("SAGELLM_VENDOR_DIR", usual.parent().unwrap()),
        ("SAGELLM_TEST_EXPECTED", Path::new(&expected)),
    ];
    in_child(me, &both);
    let expected = format!("CNCL 1.21.0 ({})", usual.display());
    in_child(me, &[both[1], ("SAGELLM_TEST_EXPECTED", Path::new(&expected))]);
}

/// `site-packages` of the `.venv` next to the sources, or of `VIRTUAL_ENV`, if it contains NCCL.
fn site_packages() -> Option<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv");
    let active = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from);
    [Some(own), active].into_iter().flatten().find_map(|environment| {
        let versions = std::fs::read_dir(environment.join("lib")).ok()?;
        let packages = versions.flatten().map(|version| version.path().join("site-packages"));
        packages.into_iter().find(|packages| packages.join("nvidia/nccl/lib/libnccl.so.2").is_file())
    })
}

/// Called if `file` was not found. A PyTorch for CPUs has no NCCL, so the test is skipped. A PyTorch for CUDA without
/// NCCL is a broken installation and fails the test.
fn without(file: &str) {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/lib");
    let versions = std::fs::read_dir(own).map(|folders| {
        folders.flatten().map(|folder| folder.path().join("site-packages/torch/version.py")).collect::<Vec<_>>()
    });
    for version in versions.unwrap_or_default() {
        let text = std::fs::read_to_string(version).unwrap_or_default();
        let cuda = text.lines().find(|line| line.starts_with("cuda"));
        assert!(cuda.is_none_or(|line| line.ends_with("None")), "torch in .venv is for CUDA, and {file} is not there");
    }
    eprintln!("nothing tested: no {file} in .venv or VIRTUAL_ENV, whose PyTorch is for CPUs alone");
}

/// Loads 250 MB, which takes seconds. Runs in a separate process, so that the library is loaded once and never in a
/// process that has loaded a simulator.
#[test]
fn the_real_nccl_of_torch_has_everything_that_is_used() {
    let Some(packages) = site_packages() else {
        return without("nvidia/nccl/lib/libnccl.so.2");
    };
    if !is_child() {
        return in_child("the_real_nccl_of_torch_has_everything_that_is_used", &[]);
    }
    let hints = Hints { folders: vec![packages.clone()], ..Hints::default() };
    let api = open(Vendor::Nccl, &hints).unwrap();
    let able = api.capabilities();
    let file = packages.join("nvidia/nccl/lib/libnccl.so.2");
    assert_eq!(api.describe(), format!("{} ({})", able.name, file.display()));
    let version: Vec<u32> = able.name.strip_prefix("NCCL ").unwrap().split('.').map(|n| n.parse().unwrap()).collect();
    assert!(version[0] == 2 && version[1] >= 18, "{version:?}");
    if version[1] >= 29 {
        assert_eq!(able.missing, Vec::<&str>::new(), "used, and not in {}", api.describe());
        assert!(able.gather && able.scatter && able.split && able.shrink && able.abort);
    }
    assert!(api.describe_error(5).contains("invalid usage"), "{}", api.describe_error(5));
    // NCCL's bootstrap needs a network interface, which every machine has, but no GPU.
    let (one, other) = (api.unique_id().unwrap(), api.unique_id().unwrap());
    assert_eq!((one.len(), other.len()), (128, 128));
    assert_ne!(one, other);
    // A second `open` without hints finds the library that is loaded.
    assert_eq!(open(Vendor::Nccl, &Hints::default()).unwrap().describe(), api.describe());
}

/// Compares our declarations with NVIDIA's header, if the package has it. The C compiler computes the sizes and
/// offsets.
#[test]
fn layouts_are_those_of_the_header() {
    let header = site_packages().map(|packages| packages.join("nvidia/nccl/include/nccl.h"));
    let Some(header) = header.filter(|header| header.is_file()) else {
        return without("nvidia/nccl/include/nccl.h");
    };
    // NCCL's header includes two headers of CUDA, of which it uses only one type.
    let cuda = folder().join("fake");
    std::fs::create_dir_all(&cuda).unwrap();
    std::fs::write(cuda.join("cuda_runtime.h"), "typedef struct CUstream_st *cudaStream_t;\n").unwrap();
    std::fs::write(cuda.join("cuda_fp16.h"), "\n").unwrap();
    let source = format!(
        "#include <stddef.h>\n#include \"{}\"\n\
         #define OFFSET(field, at) _Static_assert(offsetof(ncclConfig_t, field) == at, #field)\n\
         _Static_assert(sizeof(ncclUniqueId) == 128, \"id\");\n_Static_assert(sizeof(ncclConfig_t) >= 72, \"config\");\n\
         OFFSET(size, 0); OFFSET(magic, 8); OFFSET(version, 12); OFFSET(blocking, 16); OFFSET(netName, 32);\n\
         OFFSET(cgaClusterSize, 20); OFFSET(minCTAs, 24); OFFSET(maxCTAs, 28); OFFSET(splitShare, 40);\n\
         OFFSET(trafficClass, 44); OFFSET(commName, 48); OFFSET(collnetEnable, 56); OFFSET(CTAPolicy, 60);\n\
         OFFSET(shrinkShare, 64); OFFSET(nvlsCTAs, 68);\n\
         _Static_assert(ncclInProgress == 7 && ncclUint8 == 1 && ncclFloat64 == 8 && ncclBfloat16 == 9, \"numbers\");\n\
         _Static_assert(ncclSum == 0 && ncclProd == 1 && ncclMax == 2 && ncclMin == 3 && ncclAvg == 4, \"ops\");\n\
         _Static_assert(ncclScalarHostImmediate == 1 && NCCL_SPLIT_NOCOLOR == -1, \"flags\");\n",
        header.display()
    );
    build("liblayout.so", &source, &["-I", cuda.to_str().unwrap()]);
}
