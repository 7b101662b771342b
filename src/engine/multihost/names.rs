//! What the texts of errors call the ranks of a group over several hosts, and those of the ranks that are gone.

use crate::error::{Error, GO_ON, LEFT, laid_out};

#[derive(Debug, Default)]
pub struct Names {
    /// The group's name.
    pub group: String,
    pub me: usize,
    /// The process of each rank in words; empty where nobody has said it.
    pub processes: Vec<String>,
    /// The ranks of this host.
    pub mates: Vec<usize>,
}

impl Names {
    /// "rank 3 (pid 7, host b) of group 'g'"
    fn rank(&self, rank: usize) -> String {
        let process = self.processes.get(rank).filter(|process| !process.is_empty());
        let process = process.map_or_else(String::new, |process| format!(" ({process})"));
        format!("rank {rank}{process} of group '{}'", self.group)
    }

    fn error(&self, peer: usize, how: &str, during: &str, lines: &[String]) -> Error {
        let text = laid_out(&format!("{} {how}", self.rank(peer)), lines, GO_ON);
        Error::rank_failed(peer, text).while_rank(self.me, during)
    }

    /// It has said goodbye, and is needed while this rank does what `during` says.
    pub fn left(&self, peer: usize, during: &str) -> Error {
        self.error(peer, LEFT, during, &[])
    }

    /// Nothing more comes from it; `words` are the link's, or none.
    pub fn lost(&self, peer: usize, during: &str, words: &str) -> Error {
        if self.mates.contains(&peer) {
            return self.error(peer, "ended or left the group", during, &[]);
        }
        let words = words.lines().next().filter(|words| !words.is_empty()).unwrap_or("no more is known");
        let connection = format!("rank {} lost the connection to rank {peer} on another host: {words}", self.me);
        self.error(peer, "ended, or the network to it failed", during, &[connection])
    }
}
