//! Names the ranks of a group over several hosts for error texts, and makes the errors for ranks that left or were
//! lost.

use std::time::Duration;

use crate::error::{Error, GO_ON, LEFT, laid_out};

#[derive(Debug, Default)]
pub struct Names {
    /// The group's name.
    pub group: String,
    pub me: usize,
    /// The process of each rank as text. Empty if the rank has not reported it.
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

    /// The text for a peer that has not received what this rank sent it, although this rank has waited for `waited`
    /// before it leaves.
    pub fn not_taken(&self, peer: usize, waited: Duration) -> String {
        format!(
            "rank {} leaves group '{}' although rank {peer} has not received the data of its last calls for {} s; perhaps the \
             two ranks called different operations",
            self.me,
            self.group,
            waited.as_secs()
        )
    }

    fn error(&self, peer: usize, how: &str, during: &str, lines: &[String]) -> Error {
        let text = laid_out(&format!("{} {how}", self.rank(peer)), lines, GO_ON);
        Error::rank_failed(peer, text).while_rank(self.me, during)
    }

    /// Returns the error for a peer that has left in order although this rank still needs it. `during` says what this
    /// rank was doing.
    pub fn left(&self, peer: usize, during: &str) -> Error {
        self.error(peer, LEFT, during, &[])
    }

    /// Returns the error for a peer that was lost. `words` is the link's text, or empty.
    pub fn lost(&self, peer: usize, during: &str, words: &str) -> Error {
        if self.mates.contains(&peer) {
            return self.error(peer, "ended or left the group", during, &[]);
        }
        let words = words.lines().next().filter(|words| !words.is_empty()).unwrap_or("no more is known");
        let connection = format!("rank {} lost the connection to rank {peer} on another host: {words}", self.me);
        self.error(peer, "ended, or the network to it failed", during, &[connection])
    }
}
