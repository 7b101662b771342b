//! How processes find each other from the bytes of an id.
//!
//! Every process that makes an id, or is part of a communicator, serves a key-value store on a socket in the abstract
//! namespace. The socket has a random name and ends with the process. An id holds that name and a random prefix for its
//! keys. The rest of its bytes is a pattern that is checked, so an id with a wrong byte is rejected.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use once_cell::sync::Lazy;
use sagellm::error::{Error, Result};
use sagellm::host::Store;

use crate::settings;

pub const NAME: usize = 16;
pub type Name = [u8; NAME];

/// Where ranks meet: the store of a process, and the prefix of this meeting's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    pub server: Name,
    pub prefix: Name,
}

fn random() -> Name {
    let mut name = [0; NAME];
    // SAFETY: the buffer has the length that is passed.
    let got = unsafe { libc::getrandom(name.as_mut_ptr().cast(), NAME, 0) };
    assert_eq!(got, NAME as isize, "getrandom gives small requests whole");
    name
}

pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

impl Place {
    /// A place in this process's own store.
    pub fn new() -> std::result::Result<Place, String> {
        Ok(Place { server: server()?, prefix: random() })
    }

    /// Returns the place at `server` that all ranks derive from this place and the same `salt`.
    pub fn derive(&self, server: Name, salt: &[u8]) -> Place {
        let whole = [self.prefix.as_slice(), salt].concat();
        let mut prefix = [0; NAME];
        prefix[..8].copy_from_slice(&hash(&whole).to_le_bytes());
        prefix[8..].copy_from_slice(&hash(&[&whole[..], b"+"].concat()).to_le_bytes());
        Place { server, prefix }
    }

    /// A number that is equal in all processes.
    pub fn number(&self) -> u64 {
        hash(&self.prefix)
    }

    /// Writes the place as an id of a vendor; `vendor` is its letter. Writes every byte; the pattern has no zero byte.
    pub fn to_id(self, vendor: u8, id: &mut [u8]) {
        let body = [self.server, self.prefix].concat();
        let mut pattern = hash(&body) ^ u64::from(vendor) << 32 ^ id.len() as u64;
        for (at, byte) in id.iter_mut().enumerate() {
            pattern = pattern.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            *byte = body.get(at).copied().unwrap_or((pattern >> 56) as u8 | 1);
        }
    }

    /// `None` if the bytes are not what `to_id` wrote.
    pub fn from_id(vendor: u8, id: &[u8]) -> Option<Place> {
        let place = Place { server: id[..NAME].try_into().ok()?, prefix: id[NAME..2 * NAME].try_into().ok()? };
        let mut whole = vec![0; id.len()];
        place.to_id(vendor, &mut whole);
        (whole == id).then_some(place)
    }

    /// True at the first call for this place in this process.
    pub fn first_use(&self) -> bool {
        static USED: Mutex<Option<HashSet<Place>>> = Mutex::new(None);
        USED.lock().unwrap().get_or_insert_default().insert(*self)
    }

    /// True if the store is that of this process.
    pub fn is_served_here(&self) -> bool {
        Lazy::get(&SERVER).is_some_and(|served| served.as_ref() == Ok(&self.server))
    }

    pub fn connect(&self) -> Result<Client> {
        let wrong = |error: std::io::Error| {
            Error::system(format!("simulator: the process that made the id does not answer: {error}"))
        };
        let stream = UnixStream::connect_addr(&address(&self.server).map_err(wrong)?).map_err(wrong)?;
        let limit = Some(settings::get().ceiling.min(Duration::from_secs(20)));
        stream.set_read_timeout(limit).and_then(|()| stream.set_write_timeout(limit)).map_err(wrong)?;
        Ok(Client { stream: Mutex::new(stream), prefix: self.prefix })
    }
}

fn address(name: &Name) -> std::io::Result<SocketAddr> {
    let text: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddr::from_abstract_name(format!("sagellm-sim-{text}"))
}

type Served = std::result::Result<Name, String>;

/// This process's store. It is started when it is first needed.
static SERVER: Lazy<Served> = Lazy::new(|| {
    let name = random();
    let listen = || -> std::io::Result<()> {
        let listener = UnixListener::bind_addr(&address(&name)?)?;
        sagellm::os::watch::spawn("sim-store", move || accept(&listener)).map(|_| ())
    };
    listen().map(|()| name).map_err(|error| format!("cannot serve a store: {error}"))
});

pub fn server() -> Served {
    SERVER.clone()
}

type Keys = Arc<Mutex<HashMap<Vec<u8>, Vec<u8>>>>;

fn accept(listener: &UnixListener) {
    let keys = Keys::default();
    for stream in listener.incoming().flatten() {
        let keys = Arc::clone(&keys);
        let _ = sagellm::os::watch::spawn("sim-store", move || while serve(&stream, &keys).is_ok() {});
    }
}

const SET: u8 = 1;
const GET: u8 = 2;
/// Longest block, in bytes. Larger than any record of a meeting.
const LONGEST: usize = 1 << 20;

fn read_block(mut stream: &UnixStream) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    let mut block = vec![0; length];
    stream.read_exact(&mut block)?;
    Ok(block)
}

fn block(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_le_bytes()[..], bytes].concat()
}

/// Serves one request: an opcode, a key and a value. The answer says whether there is a value, followed by the value
/// (empty if there is none).
fn serve(mut stream: &UnixStream, keys: &Keys) -> std::io::Result<()> {
    let mut what = [0];
    stream.read_exact(&mut what)?;
    let (key, value) = (read_block(stream)?, read_block(stream)?);
    let mut keys = keys.lock().unwrap();
    let found = if what == [SET] { keys.insert(key, value).map(|_| Vec::new()) } else { keys.get(&key).cloned() };
    drop(keys);
    stream.write_all(&[&[u8::from(found.is_some())][..], &block(&found.unwrap_or_default())].concat())
}

pub struct Client {
    stream: Mutex<UnixStream>,
    prefix: Name,
}

impl Client {
    fn ask(&self, what: u8, key: &str, value: &[u8]) -> Result<Option<Vec<u8>>> {
        let mut stream = self.stream.lock().unwrap();
        let key = [&self.prefix[..], key.as_bytes()].concat();
        let mut exchange = || -> std::io::Result<Option<Vec<u8>>> {
            stream.write_all(&[&[what][..], &block(&key), &block(value)].concat())?;
            let mut found = [0];
            stream.read_exact(&mut found)?;
            let value = read_block(&stream)?;
            Ok((found == [1]).then_some(value))
        };
        exchange().map_err(|error| Error::system(format!("simulator: the store of the id ended: {error}")))
    }
}

impl Store for Client {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask(SET, key, value).map(|_| ())
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.ask(GET, key, &[])
    }
}
