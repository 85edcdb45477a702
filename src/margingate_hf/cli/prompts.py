"""The project's own prompts: everyday questions of different lengths and kinds."""

PROMPTS: tuple[str, ...] = (
    "What is 17 times 23? Think step by step.",
    "Write a short story about a robot who learns to paint.",
    "Explain why the sky is blue.",
    "A baker sells 48 rolls in the morning and half as many in the afternoon. Each roll costs 1.25 dollars. How much "
    "money does the baker take in that day, and how many rolls are left of the 90 that were baked?",
    "Write a Python function that checks whether a number is prime.",
    "List five facts about the ocean.",
    "If x + 3 = 10, what is x? Show your work in detail.",
    "Give me a recipe for pancakes.",
    "Who was Ada Lovelace?",
    "Translate into French: The train leaves at noon, and I have not packed yet.",
    "Summarise in one sentence: A river begins in the hills as a trickle of melting snow, gathers streams on its way "
    "down, turns mills and fills reservoirs in the valley, and ends, wide and slow, in the sea.",
    "What are the advantages of learning to play a musical instrument?",
    "How does a bicycle stay upright?",
    "Write a polite e-mail that moves a meeting from Tuesday to Thursday.",
    "Name three causes of inflation and explain each in a sentence.",
    "Why do cats purr?",
)
