//! The messages of the rendezvous, as bytes. Pure.
//!
//! Any message may be garbage, or from an earlier incarnation or another version. So reading returns `None` for
//! anything it does not fully understand. The first fields of [`Record`] and [`DecisionMessage`] never change, so that
//! different versions can report that they differ.

use std::io;

use super::addresses::{Addresses, Network, Rank, Way};
use super::unix_socket;
use crate::config::Threads;
use crate::engine::shm::memory::segment::Backing;
use crate::engine::shm::nodes::Level;
use crate::fields::{MAX_LIST, Reader, Writer};
use crate::os::{numa, topology};
use crate::select;

/// Must change with every change of these messages, of their order, or of other bytes that ranks exchange.
pub const PROTOCOL: u32 = 19;

/// Random and new for every attempt. Distinguishes the keys of live processes from those of earlier attempts.
pub type Nonce = [u8; 16];

const RECORD_MAGIC: &[u8; 8] = b"sgllmREC";
const DECISION_MAGIC: &[u8; 8] = b"sgllmVRD";
const ANSWER_MAGIC: &[u8; 8] = b"sgllmANS";
const HELLO_MAGIC: &[u8; 8] = b"sgllmHLO";
const OFFER_MAGIC: &[u8; 8] = b"sgllmOFR";

/// Longest policy that is accepted.
const MAX_POLICY: usize = select::policy::MAX_BYTES;

fn begin(magic: &[u8]) -> Writer {
    Writer::default().raw(magic)
}

fn after<'a>(bytes: &'a [u8], magic: &[u8]) -> Option<Reader<'a>> {
    bytes.strip_prefix(magic).map(Reader)
}

/// The host, user and namespaces of a rank's process, and the cores and memory that it may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub boot_id: String,
    pub uid: u32,
    pub netns: u64,
    pub pidns: u64,
    pub hostname: String,
    pub affinity: Vec<u64>,
    pub quota_millicores: Option<u64>,
    pub headroom: Option<u64>,
    /// The NUMA node to which the process is bound. `None` if it may run on several.
    pub node: Option<u32>,
    /// The last-level cache that the process uses (`numa::cache_of`). `None` if it may use several.
    pub cache: Option<u32>,
}

impl Identity {
    pub fn here() -> Identity {
        let (quota_millicores, headroom) = topology::limits();
        let affinity = topology::affinity_mask();
        Identity {
            boot_id: topology::boot_id(),
            uid: topology::uid(),
            netns: topology::netns(),
            pidns: topology::pidns(),
            hostname: topology::hostname(),
            node: numa::node_of(&affinity),
            cache: numa::cache_of(&affinity),
            affinity,
            quota_millicores,
            headroom,
        }
    }
}

/// Key `r/<rank>`: published when a rank starts the rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub nonce: Nonce,
    pub protocol: u32,
    pub version: String,
    /// `None` if another protocol version wrote it in another format.
    pub body: Option<Body>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body {
    pub size: u32,
    pub identity: Identity,
    /// Why this rank does not want shared memory. Empty if it wants shared memory.
    pub wish: String,
    /// Name of the backend that serves the group if our engines cannot.
    pub delegate: String,
    /// For each set of known peers from earlier groups: its id, and this rank's place in it.
    pub known: Vec<(Nonce, u32)>,
    /// Name of this rank's mailbox, which rank 0 uses if it is on the same host. Empty if the rank has none.
    pub mailbox: Vec<u8>,
    /// The addresses at which other ranks can reach this process.
    pub addresses: Addresses,
    pub threads: Threads,
}

impl Body {
    /// Returns the fields of this record from which rank 0 chooses the addresses of the group.
    pub fn reached(&self) -> Rank<'_> {
        let Identity { boot_id, netns, hostname, .. } = &self.identity;
        Rank { addresses: &self.addresses, hostname, place: (boot_id, *netns) }
    }
}

impl Record {
    pub fn write(&self) -> Vec<u8> {
        let writer = begin(RECORD_MAGIC).raw(&self.nonce).u32(self.protocol).text(&self.version);
        let Some(Body { size, identity, wish, delegate, known, mailbox, addresses, threads }) = &self.body else {
            return writer.0;
        };
        writer
            .u32(*size)
            .text(&identity.boot_id)
            .u32(identity.uid)
            .u64(identity.netns)
            .u64(identity.pidns)
            .text(&identity.hostname)
            .list(&identity.affinity, |to, word| to.u64(*word))
            .u64(identity.quota_millicores.unwrap_or(u64::MAX))
            .u64(identity.headroom.unwrap_or(u64::MAX))
            .u32(identity.node.unwrap_or(u32::MAX))
            .u32(identity.cache.unwrap_or(u32::MAX))
            .text(wish)
            .text(delegate)
            .list(known, |to, (id, place)| to.raw(id).u32(*place))
            .bytes(mailbox)
            .list(&addresses.ways, |to, (way, places)| to.u8(*way as u8).list(places, |to, place| to.text(place)))
            .text(&addresses.problem)
            .u32(threads.most)
            .u8(u8::from(threads.named))
            .0
    }

    pub fn read(bytes: &[u8]) -> Option<Record> {
        let mut from = after(bytes, RECORD_MAGIC)?;
        let (nonce, protocol, version) = (from.array()?, from.u32()?, from.text()?);
        let body = if protocol == PROTOCOL { Some(Record::read_body(&mut from)?) } else { None };
        Some(Record { nonce, protocol, version, body })
    }

    fn read_body(from: &mut Reader) -> Option<Body> {
        let size = from.u32()?;
        let limit = |value: u64| (value != u64::MAX).then_some(value);
        let identity = Identity {
            boot_id: from.text()?,
            uid: from.u32()?,
            netns: from.u64()?,
            pidns: from.u64()?,
            hostname: from.text()?,
            affinity: from.list(Reader::u64)?,
            quota_millicores: limit(from.u64()?),
            headroom: limit(from.u64()?),
            node: Some(from.u32()?).filter(|node| *node != u32::MAX),
            cache: Some(from.u32()?).filter(|cache| *cache != u32::MAX),
        };
        let (wish, delegate) = (from.text()?, from.text()?);
        let known = from.list(|from| Some((from.array()?, from.u32()?)))?;
        let mailbox = from.bytes(MAX_LIST)?.to_vec();
        let ways = from.list(|from| Some((Way::from_code(from.u8()?)?, from.list(Reader::text)?)))?;
        let addresses = Addresses { ways, problem: from.text()? };
        let threads = Threads { most: from.u32()?, named: from.u8()? != 0 };
        Some(Body { size, identity, wish, delegate, known, mailbox, addresses, threads })
    }
}

/// What a decision instructs the ranks that it names to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    /// Connect to rank 0's socket, or answer why you cannot.
    Share = 1,
    /// Shared memory is impossible, for the given reason. Answer, so that rank 0 knows that you are alive.
    Ask = 2,
    /// Final: all have answered, and a delegate serves the group.
    Delegate = 3,
    /// Final: rank 0 gave up, with the text of its error.
    Failed = 4,
    /// Final: all have answered, and the group spans the given hosts.
    Hosts = 5,
}

/// Key `verdict`, which only rank 0 writes. Valid only for ranks whose present nonce it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecisionMessage {
    pub id: Nonce,
    /// The nonce of each rank. All zeros for a rank without a record.
    pub nonces: Vec<Nonce>,
    pub mode: Mode,
    /// The reason, or for `Failed` the error.
    pub text: String,
    /// `Share`: name of rank 0's socket in the abstract namespace. `Hosts`: the number of each rank's host, two bytes
    /// each.
    pub detail: Vec<u8>,
    /// `Share` and `Hosts`: rank 0's policy for choosing algorithms, `select::Policy` as text. Else empty.
    pub policy: String,
    /// `Share`: the known peers that the ranks belong to, and each rank's place. No places if the ranks meet for the
    /// first time.
    pub known: (Nonce, Vec<u32>),
    /// `Delegate` and `Hosts`: how the ranks reach each other. None if they need no connections, or if a rank listed no
    /// addresses.
    pub network: Option<Network>,
}

impl DecisionMessage {
    /// Returns the number of each rank's host, for `Hosts`. In a message that was read, there is one number per rank,
    /// counted from 0 in the order of the ranks, and at least two hosts.
    pub fn hosts(&self) -> Vec<usize> {
        self.detail.chunks_exact(2).map(|two| usize::from(u16::from_le_bytes([two[0], two[1]]))).collect()
    }

    fn has_valid_hosts(&self) -> bool {
        let hosts = self.hosts();
        let mut known = 0;
        for host in &hosts {
            if *host > known {
                return false;
            }
            known = known.max(*host + 1);
        }
        hosts.len() == self.nonces.len() && self.detail.len() == 2 * hosts.len() && known > 1
    }

    pub fn write(&self) -> Vec<u8> {
        begin(DECISION_MAGIC)
            .raw(&self.id)
            .list(&self.nonces, |to, nonce| to.raw(nonce))
            .u8(self.mode as u8)
            .text(&self.text)
            .bytes(&self.detail)
            .bytes(self.policy.as_bytes())
            .raw(&self.known.0)
            .list(&self.known.1, |to, place| to.u32(*place))
            .u8(self.network.map_or(0, |network| network.way as u8))
            .u32(self.network.map_or(0, |network| network.places as u32))
            .0
    }

    pub fn read(bytes: &[u8]) -> Option<DecisionMessage> {
        let mut from = after(bytes, DECISION_MAGIC)?;
        let (id, nonces) = (from.array()?, from.list(Reader::array)?);
        let mode = match from.u8()? {
            1 => Mode::Share,
            2 => Mode::Ask,
            3 => Mode::Delegate,
            4 => Mode::Failed,
            5 => Mode::Hosts,
            _ => return None,
        };
        let message = DecisionMessage {
            id,
            nonces,
            mode,
            text: if mode == Mode::Failed { from.lines()? } else { from.text()? },
            detail: from.bytes(MAX_LIST)?.to_vec(),
            policy: String::from_utf8(from.bytes(MAX_POLICY)?.to_vec()).ok()?,
            known: (from.array()?, from.list(Reader::u32)?),
            network: match (from.u8()?, from.u32()? as usize) {
                (0, 0) => None,
                (code, places) => Some(Network { way: Way::from_code(code)?, places }),
            },
        };
        (message.mode != Mode::Hosts || message.has_valid_hosts()).then_some(message)
    }
}

/// Why ranks cannot share memory, as a text for the user. The code looks only at the variant: after `OpenFiles` the
/// group fails, because a delegate needs even more descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A process has no descriptor left.
    OpenFiles(String),
    Other(String),
}

impl Reason {
    /// Makes the reason for a failed system call. `text` shows its error.
    pub fn of(error: &io::Error, text: String) -> Reason {
        if unix_socket::is_out_of_files(error) { Reason::OpenFiles(text) } else { Reason::Other(text) }
    }

    pub fn text(&self) -> &str {
        match self {
            Reason::OpenFiles(text) | Reason::Other(text) => text,
        }
    }
}

impl From<String> for Reason {
    fn from(text: String) -> Reason {
        Reason::Other(text)
    }
}

/// Key `a/<rank>`: the answer to the decision `id`. No reason means agreement. Also sent over the socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub id: Nonce,
    pub reason: Option<Reason>,
}

impl Answer {
    pub fn write(&self) -> Vec<u8> {
        let reason =
            |to: Writer, reason: &Reason| to.u8(u8::from(matches!(reason, Reason::OpenFiles(_)))).text(reason.text());
        begin(ANSWER_MAGIC).raw(&self.id).list(&self.reason, reason).0
    }

    pub fn read(bytes: &[u8]) -> Option<Answer> {
        let mut from = after(bytes, ANSWER_MAGIC)?;
        let id = from.array()?;
        let reason = |from: &mut Reader| {
            let kind = if from.u8()? == 0 { Reason::Other } else { Reason::OpenFiles };
            from.text().map(kind)
        };
        Some(Answer { id, reason: from.list(reason)?.pop() })
    }
}

/// First message on the socket: a rank identifies itself as one that the decision names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub id: Nonce,
    pub nonce: Nonce,
    pub rank: u32,
}

impl Hello {
    pub fn write(&self) -> Vec<u8> {
        begin(HELLO_MAGIC).raw(&self.id).raw(&self.nonce).u32(self.rank).0
    }

    pub fn read(bytes: &[u8]) -> Option<Hello> {
        let mut from = after(bytes, HELLO_MAGIC)?;
        Some(Hello { id: from.array()?, nonce: from.array()?, rank: from.u32()? })
    }
}

/// Rank 0's reply to a hello, sent with descriptors. The first part has the descriptor of the memory. Every part has
/// the descriptors of the processes of the ranks in `process_of`, in that order. An offer consists of `parts` messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    pub id: Nonce,
    pub part: u32,
    pub parts: u32,
    pub segment_len: u64,
    pub backing: Backing,
    pub local_cores: u32,
    /// Number of threads that each rank may use.
    pub threads: u32,
    /// `Nodes` of the ranks, as a list. Only in the first part.
    pub nodes: Vec<u32>,
    /// What `nodes` lists. In every part.
    pub level: Level,
    /// Rank 0's pid namespace. The pids in `ranks` are valid only there.
    pub pidns: u64,
    /// (pid, host name) by rank. Only in the first part, and empty for known peers.
    pub ranks: Vec<(i32, String)>,
    pub process_of: Vec<u32>,
}

impl Offer {
    pub fn write(&self) -> Vec<u8> {
        begin(OFFER_MAGIC)
            .raw(&self.id)
            .u32(self.part)
            .u32(self.parts)
            .u64(self.segment_len)
            .u8(self.backing as u8)
            .u32(self.local_cores)
            .u32(self.threads)
            .list(&self.nodes, |to, node| to.u32(*node))
            .u8(self.level as u8)
            .u64(self.pidns)
            .list(&self.ranks, |to, (pid, host)| to.u32(*pid as u32).text(host))
            .list(&self.process_of, |to, rank| to.u32(*rank))
            .0
    }

    pub fn read(bytes: &[u8]) -> Option<Offer> {
        let mut from = after(bytes, OFFER_MAGIC)?;
        Some(Offer {
            id: from.array()?,
            part: from.u32()?,
            parts: from.u32()?,
            segment_len: from.u64()?,
            backing: match from.u8()? {
                value if value == Backing::Sealed as u8 => Backing::Sealed,
                value if value == Backing::Unsealed as u8 => Backing::Unsealed,
                _ => return None,
            },
            local_cores: from.u32()?,
            threads: from.u32()?,
            nodes: from.list(Reader::u32)?,
            level: Level::from_code(from.u8()?)?,
            pidns: from.u64()?,
            ranks: from.list(|from| Some((from.u32()? as i32, from.text()?)))?,
            process_of: from.list(Reader::u32)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_hosts_that_is_no_numbering_of_the_ranks_is_refused() {
        let message = |mode, hosts: &[u16]| DecisionMessage {
            id: [1; 16],
            nonces: vec![[2; 16]; 3],
            mode,
            text: "two hosts".into(),
            detail: hosts.iter().flat_map(|host| host.to_le_bytes()).collect(),
            policy: String::new(),
            known: Default::default(),
            network: None,
        };
        let read = |mode, hosts: &[u16]| DecisionMessage::read(&message(mode, hosts).write());
        assert_eq!(read(Mode::Hosts, &[0, 1, 0]).unwrap().hosts(), [0, 1, 0]);
        for wrong in [&[0, 1][..], &[0, 1, 0, 1], &[0, 0, 0], &[1, 0, 1], &[0, 2, 1], &[]] {
            assert_eq!(read(Mode::Hosts, wrong), None, "{wrong:?}");
        }
        let odd = DecisionMessage { detail: vec![0, 0, 1, 0, 0, 0, 9], ..message(Mode::Hosts, &[]) };
        assert_eq!(DecisionMessage::read(&odd.write()), None);
        assert!(read(Mode::Delegate, &[]).is_some(), "a delegate needs no hosts");
    }
}
