//! Compares the declarations with an installed `nccl.h`: a C++ program that includes the header prints sizes, offsets,
//! values and how every argument is passed. The program is not linked with NCCL. If there is no header, the test says
//! so and passes.
//!
//! The header is that of the NCCL wheel in `.venv`. The variable `NCCL_INCLUDE` may instead name folders of headers,
//! separated by colons.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;

use nccl_sys::*;

/// Folders with nccl.h.
fn folders() -> Option<Vec<PathBuf>> {
    if let Some(named) = std::env::var_os("NCCL_INCLUDE") {
        return Some(std::env::split_paths(&named).collect());
    }
    let libraries = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.venv/lib");
    let mut packages =
        std::fs::read_dir(libraries).ok()?.flatten().map(|python| python.path().join("site-packages/nvidia"));
    let nvidia = packages.find(|nvidia| nvidia.join("nccl/include/nccl.h").is_file())?;
    Some(vec![nvidia.join("nccl/include")])
}

const CONFIG_FIELDS: [(&str, usize); 15] = [
    ("size", offset_of!(Config, size)),
    ("magic", offset_of!(Config, magic)),
    ("version", offset_of!(Config, version)),
    ("blocking", offset_of!(Config, blocking)),
    ("cgaClusterSize", offset_of!(Config, cga_cluster_size)),
    ("minCTAs", offset_of!(Config, min_ctas)),
    ("maxCTAs", offset_of!(Config, max_ctas)),
    ("netName", offset_of!(Config, net_name)),
    ("splitShare", offset_of!(Config, split_share)),
    ("trafficClass", offset_of!(Config, traffic_class)),
    ("commName", offset_of!(Config, comm_name)),
    ("collnetEnable", offset_of!(Config, collnet_enable)),
    ("CTAPolicy", offset_of!(Config, cta_policy)),
    ("shrinkShare", offset_of!(Config, shrink_share)),
    ("nvlsCTAs", offset_of!(Config, nvls_ctas)),
];

const VALUES: [(&str, i64); 29] = [
    ("ncclSuccess", SUCCESS as i64),
    ("ncclInProgress", IN_PROGRESS as i64),
    ("ncclInt8", INT8 as i64),
    ("ncclUint8", UINT8 as i64),
    ("ncclInt32", INT32 as i64),
    ("ncclUint32", UINT32 as i64),
    ("ncclInt64", INT64 as i64),
    ("ncclUint64", UINT64 as i64),
    ("ncclFloat16", FLOAT16 as i64),
    ("ncclFloat32", FLOAT32 as i64),
    ("ncclFloat64", FLOAT64 as i64),
    ("ncclBfloat16", BFLOAT16 as i64),
    ("ncclFloat8e4m3", FLOAT8E4M3 as i64),
    ("ncclFloat8e5m2", FLOAT8E5M2 as i64),
    ("ncclSum", SUM as i64),
    ("ncclProd", PROD as i64),
    ("ncclMax", MAX as i64),
    ("ncclMin", MIN as i64),
    ("ncclAvg", AVG as i64),
    ("ncclScalarDevice", SCALAR_DEVICE as i64),
    ("ncclScalarHostImmediate", SCALAR_HOST as i64),
    ("NCCL_SPLIT_NOCOLOR", NO_COLOR as i64),
    ("NCCL_SHRINK_ABORT", SHRINK_ABORT as i64),
    ("NCCL_CONFIG_UNDEF_INT", UNDEFINED as i64),
    ("sizeof(ncclUniqueId)", ID_BYTES as i64),
    ("alignof(ncclUniqueId)", align_of::<UniqueId>() as i64),
    ("sizeof(ncclResult_t)", size_of::<Code>() as i64),
    ("sizeof(ncclComm_t)", size_of::<Comm>() as i64),
    ("NCCL_API_MAGIC", CONFIG_MAGIC as i64),
];

/// Returns the C++ program, which prints a line `what<TAB>value` for everything that the crate declares.
fn program() -> String {
    let mut text = String::from(
        r#"#include <nccl.h>
#include <cstddef>
#include <cstdio>
#include <type_traits>
template <class T> void how() {
  if (std::is_pointer<T>::value) std::printf("\tpointer");
  else if (std::is_class<T>::value) std::printf("\tstruct of %zu bytes", sizeof(T));
  else std::printf("\t%zu bytes", sizeof(T));
}
template <class R, class... A> void passed(const char* name, R (*)(A...)) {
  std::printf("%s", name);
  how<R>();
  int all[] = {0, (how<A>(), 0)...};
  (void)all;
  std::printf("\n");
}
int main() {
  std::printf("header\t%d\n", NCCL_VERSION_CODE);
"#,
    );
    for (name, _) in VALUES {
        writeln!(text, "  std::printf(\"%s\\t%lld\\n\", \"{name}\", static_cast<long long>({name}));").unwrap();
    }
    for (name, _) in CONFIG_FIELDS {
        writeln!(text, "  std::printf(\"config {name}\\t%zu\\n\", offsetof(ncclConfig_t, {name}));").unwrap();
    }
    for name in Table::NAMES {
        writeln!(text, "  passed(\"{name}\", static_cast<decltype(&{name})>(nullptr));").unwrap();
    }
    text + "}\n"
}

#[test]
fn the_declarations_are_those_of_the_installed_header() {
    let Some(folders) = folders() else {
        eprintln!("not compared: no nccl.h beside this checkout; NCCL_INCLUDE may name its folder");
        return;
    };
    let place = std::env::temp_dir().join(format!("nccl-sys-{}", std::process::id()));
    std::fs::create_dir_all(&place).unwrap();
    let (source, binary) = (place.join("probe.cpp"), place.join("probe"));
    std::fs::write(&source, program()).unwrap();
    // nccl.h includes these CUDA headers, but needs only the type of a stream from them. The wheels do not have all of
    // them.
    for cuda in ["cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"] {
        std::fs::write(
            place.join(cuda),
            "#pragma once\n#include <stddef.h>\ntypedef struct CUstream_st* cudaStream_t;\n",
        )
        .unwrap();
    }
    // This is no build script, so `cc` is given the values that cargo would have set.
    let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut build = cc::Build::new();
    build.cpp(true).target(&host).host(&host).opt_level(0).cargo_metadata(false).cargo_warnings(false);
    let mut command: Command = build.get_compiler().to_command();
    command.arg("-std=c++17").arg("-w").arg("-I").arg(&place);
    command.args(folders.iter().flat_map(|folder| [Path::new("-isystem"), folder]));
    let done = command.arg(&source).arg("-o").arg(&binary).output().expect("the C++ compiler starts");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let said = Command::new(&binary).output().unwrap();
    assert!(said.status.success());
    std::fs::remove_dir_all(&place).unwrap();

    let said = String::from_utf8(said.stdout).unwrap();
    let said: BTreeMap<&str, &str> = said.lines().filter_map(|line| line.split_once('\t')).collect();
    let mut expected: BTreeMap<String, String> = BTreeMap::new();
    expected.extend(VALUES.map(|(name, value)| (name.to_string(), value.to_string())));
    expected.extend(CONFIG_FIELDS.map(|(name, offset)| (format!("config {name}"), offset.to_string())));
    expected.extend(Table::SIGNATURES.iter().map(|(name, how)| (name.to_string(), how.join("\t"))));
    let wrong: Vec<String> = expected
        .iter()
        .filter(|(name, value)| said.get(name.as_str()) != Some(&value.as_str()))
        .map(|(name, value)| format!("{name}: {value:?} here, {:?} in the header", said.get(name.as_str())))
        .collect();
    assert!(wrong.is_empty(), "nccl.h {}: {wrong:#?}", said["header"]);
    assert!(expected.len() > 70, "few things were compared");
}
