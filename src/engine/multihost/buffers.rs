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
        // An empty buffer fits nothing, and would stay here for ever.
        if self.spare.len() < KEPT && (1..=LARGEST).contains(&buffer.len()) {
            self.spare.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_buffers_leave_room_for_others() {
        let mut buffers = Buffers::default();
        (0..100).for_each(|_| buffers.give_back(Vec::new()));
        buffers.give_back(vec![7; 4096]);
        assert_eq!(buffers.take(4096)[0], 7, "the buffer that was given back");
    }
}
