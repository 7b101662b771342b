//! What carries the frames of a wire, as its user chooses it.

use std::path::PathBuf;

use crate::engine::loader::Hints;
use crate::engine::multihost::ucx::Wanted;
use crate::error::{Error, Result};

#[derive(Clone, Debug)]
pub enum Over {
    /// TCP connections.
    Tcp,
    /// UCX, beside one TCP connection to each process (`carried`).
    Ucx(Wanted),
}

impl Over {
    /// `link` is "tcp" or "ucx". After "ucx" may follow a colon and the interfaces that UCX uses, unless UCX's own
    /// variable names them. The library of UCX may be in `folders`.
    pub fn named(link: &str, folders: &[String]) -> Result<Over> {
        let (name, interfaces) = link.split_once(':').unwrap_or((link, ""));
        match name {
            "tcp" => Ok(Over::Tcp),
            "ucx" => {
                let hints = Hints { path: None, folders: folders.iter().map(PathBuf::from).collect() };
                let devices = (!interfaces.is_empty()).then(|| ("NET_DEVICES".to_string(), interfaces.to_string()));
                Ok(Over::Ucx(Wanted { hints, settings: devices.into_iter().collect() }))
            }
            _ => Err(Error::invalid(format!("sagellm: SAGELLM_LINK={name}, expected tcp or ucx"))),
        }
    }
}
