//! Ranks as threads of one process: the same engine over anonymous memory. For tests, for loom-free stress, and to learn
//! the API without starting processes.

use std::sync::Arc;

use super::shm::area::Area;
use super::shm::layout::Layout;
use super::shm::segment::Segment;
use crate::error::{Error, Result};

/// One area per rank, all over the same memory.
pub fn areas(ranks: usize) -> Result<Vec<Arc<Area>>> {
    let layout = Layout::new(ranks, usize::MAX)
        .ok_or_else(|| Error::Invalid(format!("sagellm: no layout for {ranks} ranks in one process")))?;
    let segment = Arc::new(Segment::anonymous(layout.total())?);
    Ok((0..ranks).map(|me| Arc::new(Area::new(Arc::clone(&segment), layout, me))).collect())
}
