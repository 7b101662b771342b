//! Buffers that a lane uses again for its frames and data.

#[derive(Default)]
pub struct Buffers {
    spare: Vec<Vec<u8>>,
}

impl Buffers {
    /// Returns the smallest spare buffer that fits, so that a posted receive of a frame does not hold a large buffer.
    pub fn take(&mut self, bytes: usize) -> Vec<u8> {
        let fitting = self.spare.iter().enumerate().filter(|(_, spare)| spare.len() >= bytes);
        let smallest = fitting.min_by_key(|(_, spare)| spare.len()).map(|(at, _)| at);
        smallest.map_or_else(|| vec![0; bytes], |at| self.spare.swap_remove(at))
    }

    pub fn give_back(&mut self, buffer: Vec<u8>) {
        const KEPT: usize = 16;
        const LARGEST: usize = 8 << 20;
        if self.spare.len() < KEPT && buffer.len() <= LARGEST {
            self.spare.push(buffer);
        }
    }
}
