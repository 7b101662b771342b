//! If the feature `torch` is on, builds the cxx glue into the static library. cxx also generates the headers that
//! `cpp/` includes; `setup.py` finds them below `target/cxxbridge`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "torch")]
    {
        println!("cargo:rerun-if-changed=src/ffi/bridge.rs");
        println!("cargo:rerun-if-changed=src/ffi/observe.rs");
        println!("cargo:rerun-if-changed=src/ffi/arrays.rs");
        println!("cargo:rerun-if-changed=src/ffi/memory.rs");
        println!("cargo:rerun-if-changed=cpp/host/host.hpp");
        cxx_build::bridges(["src/ffi/bridge.rs", "src/ffi/observe.rs", "src/ffi/arrays.rs", "src/ffi/memory.rs"])
            .include("cpp")
            .std("c++17")
            .flag_if_supported("-fvisibility=hidden")
            .compile("sagellm_bridge");
    }
}
