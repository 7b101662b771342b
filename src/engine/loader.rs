//! Finds a vendor's library or UCX at run time, and looks up functions in it.
//!
//! Uses the first file that can be opened. If none can be opened, the error lists the files that were tried. The places
//! are searched in this order:
//! 1. the path that the user names (option `vendor`, otherwise the variable `SAGELLM_<KEY>_LIBRARY`). If it cannot be
//!    opened, no other file is tried, because the user chose this one;
//! 2. the copy that this process has already loaded, usually by torch, so that there are never two copies;
//! 3. the folders of the hints (Python's `site-packages`), and `SAGELLM_VENDOR_DIR`;
//! 4. the bare file name, which the dynamic loader searches for.
//!
//! Every symbol is optional. A library is never closed, because destructors of vendor libraries may end the process.

#![allow(unsafe_code)] // opens libraries, and looks up functions in them

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};

use crate::config;
use crate::error::{Error, Result};

/// Names of a library, and the advice if it is not found.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// Part of the variable `SAGELLM_<KEY>_LIBRARY`.
    pub key: &'static str,
    /// Name in error texts.
    pub title: &'static str,
    /// File names, the preferred first.
    pub names: &'static [&'static str],
    /// Path of the folder into which the library's Python package installs its file, relative to a folder of the hints.
    pub package: &'static str,
    /// A second library that may contain some of the symbols. It has its own key.
    pub companion: Option<&'static Known>,
    /// What the user can do if the library is not found.
    pub fix: &'static str,
}

/// Places to search, in addition to those that this file knows.
#[derive(Clone, Debug, Default)]
pub struct Hints {
    /// Path or name of the library. If set, no other file is tried.
    pub path: Option<PathBuf>,
    /// Folders to search, including Python's `site-packages`.
    pub folders: Vec<PathBuf>,
}

/// An open library. Its handles are valid until the process ends.
#[derive(Debug)]
pub struct Library {
    pub title: &'static str,
    /// The library's file according to the loader. If the loader does not report it, this is the name that was opened.
    pub path: String,
    handles: Vec<Handle>,
}

#[derive(Clone, Copy, Debug)]
struct Handle(*mut c_void);

// SAFETY: a dlopen handle is valid in every thread, and this one is never closed.
unsafe impl Send for Handle {}
// SAFETY: as above; several threads may call dlsym concurrently.
unsafe impl Sync for Handle {}

impl Library {
    /// Opens the library. The error says what was tried and what to do.
    pub fn open(known: &'static Known, hints: &Hints) -> Result<Library> {
        let named = hints.path.clone().or_else(|| config::library(known.key).map(PathBuf::from));
        let mut tried = Vec::new();
        let first = match &named {
            Some(path) => open(path.as_os_str().as_encoded_bytes(), false, &mut tried),
            None => search(known, hints, &mut tried),
        };
        let handle = first.ok_or_else(|| {
            let variable = format!("SAGELLM_{}_LIBRARY", known.key);
            let why = match (&hints.path, &named) {
                (Some(_), _) => {
                    format!("This one was named by the option vendor or by {variable}, so no other was tried.")
                }
                (None, Some(_)) => format!("This one was named by {variable}, so no other was tried."),
                (None, None) => format!("{} Or name its file in {variable}.", known.fix),
            };
            Error::system(format!("sagellm: {} was not found. Tried: {}. {why}", known.title, tried.join("; ")))
        })?;
        let path = path_of(handle).unwrap_or_else(|| known.names[0].to_string());
        let mut handles = vec![handle];
        if let Some(companion) = known.companion {
            handles.extend(open_companion(companion, named.as_deref(), hints));
        }
        Ok(Library { title: known.title, path, handles })
    }

    /// Returns the address of a function or of data, in the library or its companion.
    pub fn address(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: dlopen handles that are never closed; `name` ends in a zero byte.
        let found = |handle: &Handle| unsafe { libc::dlsym(handle.0, name.as_ptr()) };
        self.handles.iter().map(found).find(|address| !address.is_null())
    }

    /// Looks up a function by its name.
    ///
    /// # Safety
    /// `F` must be a function pointer type that matches the library's declaration of the function.
    pub unsafe fn symbol<F: Copy>(&self, name: &'static str) -> Symbol<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the caller guarantees the type; the sizes are equal, as asserted above, and the address is not null.
        let function =
            self.address(name).map(|address| unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) });
        Symbol { function, name }
    }

    pub fn has(&self, name: &str) -> bool {
        self.address(name).is_some()
    }

    /// Returns the names in `names` that the library does not have.
    pub fn missing(&self, names: &[&'static str]) -> Vec<&'static str> {
        names.iter().copied().filter(|name| !self.has(name)).collect()
    }

    /// Returns the error for a library that is too old to have the function `name`.
    pub fn lacks(&self, name: &str) -> Error {
        Error::system(format!(
            "sagellm: {} ({}) has no {name}; a newer version of the library has it",
            self.title, self.path
        ))
    }
}

/// A function that the library may lack.
#[derive(Clone, Copy, Debug)]
pub struct Symbol<F> {
    function: Option<F>,
    name: &'static str,
}

impl<F: Copy> Symbol<F> {
    pub fn there(&self) -> bool {
        self.function.is_some()
    }

    pub fn optional(&self) -> Option<F> {
        self.function
    }

    /// Returns the function, or an error that names it if the library does not have it.
    pub fn of(&self, library: &Library) -> Result<F> {
        self.function.ok_or_else(|| library.lacks(self.name))
    }
}

/// Declares the functions of one vendor: a struct with one optional symbol on each line, `load`, and `NAMES`.
macro_rules! symbols {
    ($(#[$meta:meta])* $table:ident { $($field:ident = $name:literal ($($argument:ty),* $(,)?) -> $result:ty;)* }) => {
        $(#[$meta])*
        pub struct $table { $(pub $field: $crate::engine::loader::Symbol<unsafe extern "C" fn($($argument),*) -> $result>,)* }
        impl $table {
            /// Every name that is looked up.
            pub const NAMES: &'static [&'static str] = &[$($name),*];
            pub fn load(library: &$crate::engine::loader::Library) -> $table {
                $table {
                    // SAFETY: each declaration matches the vendor's, as the comment at the top of the file says.
                    $($field: unsafe { library.symbol($name) },)*
                }
            }
        }
    };
}
pub(crate) use symbols;

fn search(known: &'static Known, hints: &Hints, tried: &mut Vec<String>) -> Option<Handle> {
    let loaded = known.names.iter().find_map(|name| open(name.as_bytes(), true, tried));
    if loaded.is_some() {
        return loaded;
    }
    tried.clear(); // a copy that is not loaded yet is not a failure
    let own = config::vendor_folder().map(PathBuf::from);
    for folder in hints.folders.iter().chain(own.iter()) {
        for inside in [folder.clone(), folder.join(known.package)] {
            for file in known.names.iter().map(|name| inside.join(name)).filter(|file| file.is_file()) {
                if let Some(handle) = open(file.as_os_str().as_encoded_bytes(), false, tried) {
                    return Some(handle);
                }
            }
        }
    }
    known.names.iter().find_map(|name| open(name.as_bytes(), false, tried))
}

/// Opens the companion of a library. If the user named the main library, the companion must be named too or be in the
/// same folder, so that it never comes from another installation.
fn open_companion(known: &'static Known, beside: Option<&Path>, hints: &Hints) -> Option<Handle> {
    let mut tried = Vec::new();
    match (config::library(known.key), beside) {
        (Some(path), _) => open(path.as_bytes(), false, &mut tried),
        (None, Some(main)) => {
            let folder = main.parent()?;
            let files = known.names.iter().map(|name| folder.join(name)).filter(|file| file.is_file());
            files.filter_map(|file| open(file.as_os_str().as_encoded_bytes(), false, &mut tried)).next()
        }
        (None, None) => search(known, hints, &mut tried),
    }
}

fn open(name: &[u8], loaded_only: bool, tried: &mut Vec<String>) -> Option<Handle> {
    let c_name = CString::new(name).ok()?;
    let flags = libc::RTLD_LAZY | libc::RTLD_LOCAL | if loaded_only { libc::RTLD_NOLOAD } else { 0 };
    // SAFETY: the name ends in a zero byte. The library's initialisers run here; the user installed that library.
    let handle = unsafe { libc::dlopen(c_name.as_ptr(), flags) };
    if !handle.is_null() {
        return Some(Handle(handle));
    }
    // SAFETY: dlerror returns null or a text that is valid until this thread's next call of dlerror.
    let why = unsafe {
        let text = libc::dlerror();
        if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    };
    tried.push(if why.is_empty() { String::from_utf8_lossy(name).into_owned() } else { why });
    None
}

/// The file to which a handle belongs.
fn path_of(handle: Handle) -> Option<String> {
    /// The first fields of `struct link_map` in glibc and musl.
    #[repr(C)]
    struct LinkMap {
        base: usize,
        name: *const c_char,
    }
    const RTLD_DI_LINKMAP: libc::c_int = 2;
    let mut map: *const LinkMap = std::ptr::null();
    // SAFETY: the handle is open; dlinfo writes one pointer to a record that lives as long as the library.
    let status = unsafe { libc::dlinfo(handle.0, RTLD_DI_LINKMAP, (&raw mut map).cast()) };
    if status != 0 || map.is_null() {
        return None;
    }
    // SAFETY: the record and its name live as long as the library, which is never closed.
    let name = unsafe { CStr::from_ptr((*map).name) }.to_string_lossy().into_owned();
    (!name.is_empty()).then_some(name)
}
